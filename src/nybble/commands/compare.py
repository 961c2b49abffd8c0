"""`nybble compare`: recipes x seeds on the same data, and what each recipe costs against a baseline."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nybble.commands.flags import parse_flags
from nybble.errors import ConfigError

if TYPE_CHECKING:
    from nybble.analysis.summary import RunSummary
    from nybble.commands.compare_runs import Task


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
    questions: int = 100
    """Multiple-choice questions on held-out text for each trained model; 0 for none."""
    batch: int = 0
    """Sequences in one forward pass; 0 is the preset's own."""
    jobs: int = 0
    """Runs at a time; 0 is one a core, or one on a GPU. Each has one thread on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    compile: bool = False
    """Compile the models with torch.compile: pays in long runs on a GPU."""
    dry_run: bool = False
    """Print what would run and what it would cost, and stop."""
    report_only: bool = False
    """Report on the runs that are done, and make none."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        for name in ("steps", "questions", "jobs", "batch"):
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

    @property
    def recipe_names(self) -> list[str]:
        return [name.strip() for name in self.recipes.split(",") if name.strip()]

    @property
    def shares(self) -> list[float]:
        try:
            return sorted({float(word) for word in self.lengths.split(",") if word.strip()})
        except ValueError:
            raise ConfigError(
                f"lengths is {self.lengths!r}; write numbers with commas between them"
            ) from None


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(CompareConfig, arguments, "compare")
    from nybble.commands.compare_plan import describe, on_gpu, plan
    from nybble.commands.compare_runs import run_all

    tasks = plan(config)
    left = [task for task in tasks if not task.done]
    jobs = config.jobs or (1 if on_gpu(config) else os.cpu_count() or 1)
    if not config.report_only:
        print("\n".join(describe(tasks, left, jobs)))
    if config.dry_run:
        return 0
    if left and not config.report_only:
        run_all(left, jobs)
    print(write_report(config, tasks))
    return 0


def write_report(config: CompareConfig, tasks: list[Task]) -> str:
    """Writes report.md, table.csv, compare.png and runs.jsonl; returns the report."""
    from nybble.analysis.compare import compare
    from nybble.analysis.compare_plot import plot_comparison
    from nybble.analysis.compare_report import markdown, table_csv

    runs = [summary for task in tasks if (summary := task.summary()) is not None]
    if not runs:
        raise ConfigError(f"out: no run is done in {config.out}; leave out --report-only to make some")
    baseline, seeds = tasks[0].label, range(config.seeds)
    planned = dict.fromkeys((task.config.preset, task.label) for task in tasks)
    results = compare(runs, baseline, seeds, planned)
    report = markdown(results, baseline, seeds, _about(config, tasks, runs))
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "report.md").write_text(report, encoding="utf-8")
    (config.out / "table.csv").write_text(table_csv(results), encoding="utf-8")
    (config.out / "runs.jsonl").write_text("".join(run.to_json() + "\n" for run in runs), encoding="utf-8")
    plot_comparison(runs, results, baseline, config.out / "compare.png")
    return report


def _about(config: CompareConfig, tasks: list[Task], runs: list[RunSummary]) -> list[str]:
    whole = {task.config.preset: task for task in tasks if task.share == 1}
    lines = [
        f"{preset}: {task.config.schedule.steps} steps, {task.tokens:,} tokens, "
        f"{task.flops_per_token / 6e6:.1f} M weights a token"
        for preset, task in whole.items()
    ]
    made = [task.folder / "env.json" for task in tasks if (task.folder / "env.json").is_file()]
    if made:
        facts = json.loads(made[0].read_text(encoding="utf-8"))
        lines.append(
            f"{facts['numerics']}; torch {facts['versions']['torch']}; revision {facts['git_revision']}"
        )
    lines += [
        f"data {config.data}, {config.seeds} seeds; baseline also at {config.lengths or 'no'} of the steps",
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
        if field.name in ("presets", "jobs", "dry_run", "report_only") or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value) or "''"]
    return " ".join(words)
