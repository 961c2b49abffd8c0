"""One run of a comparison: its settings, what they share with the other runs', and what it came to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nybble.analysis.summary import RunSummary, read_summary
from nybble.checkpoints.identity import digest
from nybble.errors import ConfigError
from nybble.pretrain import metrics
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import flatten, load_toml

FREE = (
    *("out", "recipe", "seed", "device", "threads", "compile", "graph"),
    *("activation_checkpointing", "keep_activations"),
)
FREE_SECTIONS = ("checkpoint.", "log.")
"""Settings in which runs of one comparison may differ: those of precision, of pairing and of convenience."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    config: PretrainConfig
    label: str
    """Of the recipe."""
    share: float
    flops_per_token: float
    questions: int
    recipe_hash: str
    data: str
    """Digest of the dataset."""
    elsewhere: RunSummary | None = None
    """What the run came to on another machine."""

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def key(self) -> tuple[str, str, int, float]:
        """That of its summary."""
        return self.config.preset, self.label, self.config.seed, self.share

    @property
    def name(self) -> str:
        """For messages."""
        return name_of(self.key)

    @property
    def tokens(self) -> int:
        return self.config.schedule.steps * self.config.batch.tokens_per_step

    @property
    def settings(self) -> str:
        """Digest of all that runs of one comparison share at this size and length.

        Of what is not at its default, so that a setting that a later version adds does not change it.
        """
        usual = flatten(PretrainConfig())
        ours = {key: value for key, value in flatten(self.config).items() if value != usual[key]}
        return digest({key: value for key, value in ours.items() if not _free(key) and key != "data"})[:12]

    @property
    def saved(self) -> bool:
        """There is a checkpoint to go on from."""
        return (self.folder / "checkpoints").is_dir() and any((self.folder / "checkpoints").glob("step_*"))

    @property
    def done(self) -> bool:
        """Nothing is left to do: the run ended and answered its questions, or diverged, or is known."""
        if self.elsewhere is not None:
            return True
        summary = self.summary()
        return summary is not None and not (
            self.questions and summary.accuracy is None and not summary.diverged
        )

    def summary(self) -> RunSummary | None:
        """What the run came to; None if it is still to be made or to be ended."""
        if self.elsewhere is not None:
            return self.elsewhere
        file = self.folder / "metrics.jsonl"
        preset, label, seed, share = self.key
        return read_summary(
            self.folder,
            metrics.read(file) if file.is_file() else [],
            self.config.schedule.steps,
            preset=preset,
            recipe=label,
            seed=seed,
            tokens=self.tokens,
            share=share,
            flops_per_token=self.flops_per_token,
            settings=self.settings,
            recipe_hash=self.recipe_hash,
            data=self.data,
        )


def name_of(key: tuple[str, str, int, float]) -> str:
    """A run's preset, recipe, seed and length, for messages."""
    preset, recipe, seed, share = key
    length = "" if share == 1 else f", {share:g} of the length"
    return f"{preset} {recipe} seed {seed}{length}"


def _free(key: str) -> bool:
    return key in FREE or key.startswith(FREE_SECTIONS)


def known(task: Task, summaries: Mapping[tuple[str, str, int, float], RunSummary], source: str) -> Task:
    """The task, done if `summaries` hold its run.

    Raises ConfigError if they hold one that differs from it in more than precision.
    """
    found = summaries.get(task.key)
    if found is None:
        return task
    for what, theirs, ours in (
        ("settings", found.settings, task.settings),
        ("recipe", found.recipe_hash, task.recipe_hash),
        ("data", found.data, task.data),
    ):
        if theirs != ours:
            raise ConfigError(
                f"{source}: {task.name} was made with other {what} ({theirs or 'not said'}, here {ours}); "
                "take the steps, batch, data and version of that comparison, or leave --known out"
            )
    return replace(task, elsewhere=found)


def check_folder(task: Task) -> None:
    """Raises ConfigError if the run in the task's folder differs from the plan in more than precision."""
    saved = task.folder / "config.toml"
    if not saved.is_file():
        return
    ours = flatten(task.config)
    for key, value in flatten(load_toml(saved, PretrainConfig())).items():
        if not _free(key) and str(value) != str(ours[key]):
            raise ConfigError(
                f"{saved} has {key} {value!r}, this comparison has {ours[key]!r}: recipes are compared only "
                "where they differ in nothing but precision; use the same settings, or another --out"
            )
    table = task.folder / "precision.txt"
    found = re.match(r"recipe .* \((\w+)\)", table.read_text(encoding="utf-8")) if table.is_file() else None
    if found and found[1] != task.recipe_hash:
        raise ConfigError(
            f"{task.folder} was made with another version of the recipe {task.label} ({found[1]}, now "
            f"{task.recipe_hash}); delete that folder, or compare into another --out"
        )
