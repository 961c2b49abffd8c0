"""The runs of a comparison: which there are, which are done, and how one is made."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Thread

from nybble.analysis.choices import accuracy, questions
from nybble.analysis.summary import CHOICES, DIVERGED, RunSummary, read_summary
from nybble.errors import ConfigError, NonFiniteError, NybbleError
from nybble.pretrain import metrics
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import flatten, load_toml

FREE = ("out", "recipe", "seed", "device", "threads", "compile", "activation_checkpointing")
FREE_SECTIONS = ("checkpoint.", "log.")
"""Settings in which runs of one comparison may differ: those of precision, of pairing and of convenience."""

_stopped = Event()
"""In a worker that was told to stop: a pool hands its workers one task ahead, which must not begin."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    config: PretrainConfig
    label: str
    """Of the recipe."""
    share: float
    flops_per_token: float
    questions: int

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def name(self) -> str:
        """For messages."""
        length = "" if self.share == 1 else f", {self.share:g} of the length"
        return f"{self.config.preset} {self.label} seed {self.config.seed}{length}"

    @property
    def tokens(self) -> int:
        return self.config.schedule.steps * self.config.batch.tokens_per_step

    @property
    def done(self) -> bool:
        """Nothing is left to do: the run ended and answered its questions, or diverged."""
        summary = self.summary()
        if summary is None:
            return False
        return bool(summary.diverged) or not self.questions or (self.folder / CHOICES).is_file()

    def summary(self) -> RunSummary | None:
        """What the run came to; None if it is still to be made or to be ended."""
        file = self.folder / "metrics.jsonl"
        return read_summary(
            self.folder,
            metrics.read(file) if file.is_file() else [],
            self.config.schedule.steps,
            preset=self.config.preset,
            recipe=self.label,
            seed=self.config.seed,
            tokens=self.tokens,
            share=self.share,
            flops_per_token=self.flops_per_token,
        )


def check_folder(task: Task, recipe_hash: str) -> None:
    """Raises ConfigError if the run in the task's folder differs from the plan in more than precision."""
    saved = task.folder / "config.toml"
    if not saved.is_file():
        return
    ours = flatten(task.config)
    for key, value in flatten(load_toml(saved, PretrainConfig())).items():
        free = key in FREE or key.startswith(FREE_SECTIONS)
        if not free and str(value) != str(ours[key]):
            raise ConfigError(
                f"{saved} has {key} {value!r}, this comparison has {ours[key]!r}: recipes are compared only "
                "where they differ in nothing but precision; use the same settings, or another --out"
            )
    table = task.folder / "precision.txt"
    found = re.match(r"recipe .* \((\w+)\)", table.read_text(encoding="utf-8")) if table.is_file() else None
    if found and found[1] != recipe_hash:
        raise ConfigError(
            f"{task.folder} was made with another version of the recipe {task.label} ({found[1]}, now "
            f"{recipe_hash}); delete that folder, or compare into another --out"
        )


def run(task: Task) -> str:
    """Makes, or ends, one run; returns a line about it. What it prints goes to log.txt of its folder.

    A run that meets a NaN or an infinity has diverged, which is a result.
    """
    from nybble.pretrain.start import pretrain

    if _stopped.is_set():
        raise NybbleError(f"{task.name} was not begun; the same line makes it")
    folder = task.folder
    folder.mkdir(parents=True, exist_ok=True)
    done = task.summary() is not None
    if not done:
        saved = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").glob("step_*"))
        with open(folder / "log.txt", "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            try:
                status = pretrain(task.config, resume=saved, overwrite=not saved)
            except NonFiniteError as error:
                (folder / DIVERGED).write_text(json.dumps({"reason": str(error)}) + "\n", encoding="utf-8")
                status = 0
        if status:
            if (parent := parent_process()) is not None:
                _stopped.set()
                if not parent.is_alive():
                    os._exit(status)  # nobody is left to report to, and the pool would wait for more to do
            raise NybbleError(f"{task.name} was stopped; the same line goes on with it")
    if task.questions and not (folder / CHOICES).is_file() and not (folder / DIVERGED).is_file():
        _answer(task)
    summary = task.summary()
    assert summary is not None
    if summary.diverged:
        return f"{task.name}: diverged: {summary.diverged}"
    answers = "" if summary.accuracy is None else f", {100 * summary.accuracy:.0f} % of the questions"
    return f"{task.name}: {summary.val_loss:.4f} nats a token{answers}"


def _answer(task: Task) -> None:
    """Multiple-choice accuracy of the trained model, with the precision it was trained in."""
    from nybble.checkpoints.hub import load_model
    from nybble.data import Dataset
    from nybble.pretrain.device import pick_device

    asked = questions(Dataset.open(task.config.data), task.questions)
    model = load_model(task.folder, device=pick_device(task.config.device)).model
    found = {"questions": len(asked), "accuracy": accuracy(model, asked)}
    (task.folder / CHOICES).write_text(json.dumps(found) + "\n", encoding="utf-8")


def run_all(tasks: list[Task], jobs: int) -> None:
    """Makes the runs, `jobs` at a time, each in a process other than this one; in this one if jobs is 1.

    A signal ends it once the runs in progress are saved, or, if they got none themselves, ended.
    """
    if jobs == 1:
        for number, task in enumerate(tasks, start=1):
            print(f"[{number}/{len(tasks)}] {run(task)}", flush=True)
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = min(jobs, len(tasks))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_follow_parent) as pool:
        made = as_completed([pool.submit(run, task) for task in tasks])
        try:
            for number, future in enumerate(made, start=1):
                print(f"[{number}/{len(tasks)}] {future.result()}", flush=True)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _follow_parent() -> None:
    """In a worker: be told to stop when the comparison's own process is gone, which leaves no other sign."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, daemon=True).start()
