"""`nybble compare`: recipes x seeds on the same data, and what each recipe costs against a baseline."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nybble.commands.flags import parse_flags
from nybble.errors import ConfigError, NybbleError

if TYPE_CHECKING:
    from nybble.analysis.summary import RunSummary
    from nybble.commands.compare_task import Task


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Train every recipe with every seed, and report what each recipe costs against the first.

    All runs of a seed have the same initial weights and the same data in the same order. Runs that are done
    are not made again, and a killed comparison goes on with the same line. OUT gets report.md, table.csv,
    compare.png, runs.jsonl.
    """

    presets: tyro.conf.Positional[tuple[str, ...]] = ("tiny",)
    """Models, such as tiny; several give the cost in compute too."""
    recipes: str = "bf16,mxfp8,inkling"
    """Names of recipes or TOML files, with commas between them; the first is the baseline."""
    seeds: int = 3
    """Runs of each recipe."""
    data: Path = Path("data/sotu")
    """Folder that `nybble prepare` wrote."""
    out: Path = Path("runs/compare")
    """Folder of the runs and the report."""
    steps: int = 0
    """Optimiser steps of a run; 0 is a third of the preset's own."""
    lengths: str = "0.5,0.75"
    """Further lengths of the baseline, as shares of the steps: they give its loss by tokens."""
    ladder: str = ""
    """Lengths of the baseline, one a preset, from which its loss by compute is taken, as shares of the steps:
    0.5,1,2 lets tokens grow with size. Empty is 1 for all: equal tokens."""
    questions: int = 100
    """Multiple-choice questions on held-out text for each trained model; 0 for none."""
    batch: int = 0
    """Sequences in one forward pass; 0 is the preset's own."""
    sequence: int = 0
    """Tokens in one sequence; 0 is the preset's own. Sizes compared in compute should have equal ones."""
    jobs: int = 0
    """Runs at a time; 0 is one a core, or one on a GPU. Each has one thread on a CPU; several GPUs are taken
    in turn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    compile: bool = False
    """Compile the models with torch.compile: pays in long runs on a GPU."""
    graph: bool = True
    """On a GPU: launch each pass as a CUDA graph, as `nybble pretrain --graph`."""
    save: bool = True
    """Save checkpoints: a run that was stopped goes on where it was, and its model can be sampled from."""
    known: tuple[Path, ...] = ()
    """Files runs.jsonl of the same comparison on other machines: their runs count as done. A run that is in
    two of them must have come to the same there."""
    dry_run: bool = False
    """Print what would run and what it would cost, and stop."""
    report_only: bool = False
    """Report on the runs that are done, and make none."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        for name in ("steps", "questions", "jobs", "batch", "sequence"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not self.presets or len(set(self.presets)) < len(self.presets):
            raise ConfigError("presets: name each model to train once")
        labels = [Path(name).stem for name in self.recipe_names]
        if len(labels) < 2 or len(set(labels)) < len(labels):
            raise ConfigError(
                f"recipes is {self.recipes!r}; name at least two different ones, with commas between them"
            )
        if any(not 0 < share < 1 for share in self.shares):
            raise ConfigError(
                f"lengths is {self.lengths!r}; each must be a share of the steps, above 0 and below 1"
            )
        if any(not 0 < share < math.inf for share in self.rungs.values()):
            raise ConfigError(f"ladder is {self.ladder!r}; each must be a share of the steps, above 0")

    @property
    def recipe_names(self) -> list[str]:
        return [name.strip() for name in self.recipes.split(",") if name.strip()]

    @property
    def shares(self) -> list[float]:
        return sorted(set(_numbers("lengths", self.lengths)))

    @property
    def rungs(self) -> dict[str, float]:
        """The length of each preset on the ladder."""
        found = _numbers("ladder", self.ladder) or [1.0] * len(self.presets)
        if len(found) != len(self.presets):
            raise ConfigError(
                f"ladder is {self.ladder!r}, but there are {len(self.presets)} presets; give each one length"
            )
        return dict(zip(self.presets, found, strict=True))


def _numbers(name: str, text: str) -> list[float]:
    """To the six digits that a run's folder is named by."""
    try:
        return [float(f"{float(word):g}") for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; write numbers with commas between them") from None


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(CompareConfig, arguments, "compare")
    from nybble.commands.compare_plan import describe, on_gpu, plan
    from nybble.commands.compare_runs import run_all

    tasks = plan(config)
    left = [task for task in tasks if not task.done]
    jobs = config.jobs or (1 if on_gpu(config) else _cores())
    if not config.report_only:
        print("\n".join(describe(tasks, left, jobs)))
    if config.dry_run:
        return 0
    failed: list[Task] = []
    if left and not config.report_only:
        done = {task.key: found for task in tasks if (found := task.summary()) is not None}

        def made(task: Task, summary: RunSummary) -> None:
            done[task.key] = summary
            _write_lines(config.out, done.values())

        failed = run_all(left, jobs, made)
    if not failed or any(task.summary() is not None for task in tasks):
        print(write_report(config, tasks))
    if failed:
        names = ", ".join(task.name for task in failed[:3]) + (", ..." if len(failed) > 3 else "")
        raise NybbleError(
            f"{len(failed)} of {len(left)} runs failed ({names}); the same line tries them again"
        )
    return 0


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_report(config: CompareConfig, tasks: list[Task]) -> str:
    """Writes report.md, table.csv, compare.png and runs.jsonl; returns the report."""
    from nybble.analysis.compare import compare, fits
    from nybble.analysis.compare_plot import plot_comparison
    from nybble.analysis.compare_report import markdown, table_csv

    runs = [summary for task in tasks if (summary := task.summary()) is not None]
    if not runs:
        raise ConfigError(f"out: no run is done in {config.out}; leave out --report-only to make some")
    baseline, seeds = tasks[0].label, range(config.seeds)
    planned = dict.fromkeys((task.config.preset, task.label) for task in tasks)
    results = compare(runs, baseline, seeds, planned, config.rungs)
    laws = fits(runs, baseline, config.rungs)
    report = markdown(results, baseline, seeds, _about(config, tasks, runs), laws)
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "report.md").write_text(report, encoding="utf-8")
    (config.out / "table.csv").write_text(table_csv(results), encoding="utf-8")
    _write_lines(config.out, runs)
    plot_comparison(runs, results, baseline, laws, config.out / "compare.png")
    return report


def _write_lines(out: Path, runs: Iterable[RunSummary]) -> None:
    """runs.jsonl, whole after each run, so that what a kill leaves can be taken to another machine."""
    out.mkdir(parents=True, exist_ok=True)
    aside = out / ".runs.jsonl.unfinished"
    aside.write_text("".join(run.to_json() + "\n" for run in runs), encoding="utf-8")
    aside.replace(out / "runs.jsonl")


def _about(config: CompareConfig, tasks: list[Task], runs: list[RunSummary]) -> list[str]:
    whole = {task.config.preset: task for task in tasks if task.share == 1}
    lines = [
        f"{preset}: {task.config.schedule.steps} steps, {task.tokens:,} tokens, "
        f"{task.flops_per_token / 6e6:.1f} M weights a token"
        for preset, task in whole.items()
    ]
    lines += dict.fromkeys(run.made_on for run in runs if run.made_on)
    lines += [
        f"data {config.data}, {config.seeds} seeds; baseline also at {config.lengths or 'no'} of the steps"
        + (f", and by compute at {config.ladder}" if config.ladder else ""),
        f"made by `{_command(config)}`",
    ]
    if len(runs) < len(tasks):
        lines.append(f"{len(tasks) - len(runs)} of {len(tasks)} runs are missing")
    return lines


def _command(config: CompareConfig) -> str:
    """The line that makes the comparison again: every flag that is not at its default."""
    words = ["nybble compare", *config.presets]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("presets", "jobs", "known", "dry_run", "report_only") or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value) or "''"]
    return " ".join(words)
