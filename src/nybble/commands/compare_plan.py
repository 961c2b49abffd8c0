"""What a comparison is going to run, and what that costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nybble.analysis.summary import RunSummary, read_lines
from nybble.commands.compare_task import Task, check_folder, known, name_of
from nybble.data import Dataset
from nybble.errors import ConfigError
from nybble.models import presets
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.defaults import preset_defaults
from nybble.pretrain.device import pick_device
from nybble.pretrain.metrics import duration
from nybble.pretrain.start import build_model
from nybble.recipes import load_recipe, resolve

if TYPE_CHECKING:
    from nybble.commands.compare import CompareConfig

WARMUP = 5
"""The rate climbs in the first fifth of the steps. After a twentieth, as presets have it, gradients jump at
the peak to as much as fifty times their norm, in some runs and not in others: that hides what recipes do."""


def plan(config: CompareConfig) -> list[Task]:
    """Every run, seeds outermost, so that a comparison that is cut short has whole seeds.

    Raises ConfigError if a folder holds a run that differs from the plan in more than precision.
    """
    elsewhere = _elsewhere(config)
    dataset = _dataset(config, list(elsewhere.values()))
    recipes = {Path(name).stem: name for name in config.recipe_names}
    loaded = {label: load_recipe(name) for label, name in recipes.items()}
    for preset in config.presets:  # a rule that matches nothing stops here, and not after the baseline's runs
        model, whole = presets.get(preset).meta_model(), _settings(config, preset, 1)
        for recipe in loaded.values():
            resolve(recipe, model, whole.schedule.steps)
    baseline = next(iter(recipes))
    hashes = {label: recipe.hash() for label, recipe in loaded.items()}
    if config.report_only:  # of recipes as they were when the runs were made
        hashes |= {found.recipe: found.recipe_hash for found in elsewhere.values()}
    if isinstance(dataset, Dataset):
        flops = {preset: flops_per_token(_settings(config, preset, 1), dataset) for preset in config.presets}
        data = dataset.sha256[:12]
    else:
        flops, data = {found.preset: found.flops_per_token for found in elsewhere.values()}, dataset
    tasks = []
    for seed in range(config.seeds):
        for preset in config.presets:
            lengths = sorted({*config.shares, config.rungs[preset]} - {1.0})
            for label, name in recipes.items():
                for share in [*lengths, 1.0] if label == baseline else [1.0]:
                    part = "" if share == 1 else f"-of-{share:g}"
                    settings = dataclasses.replace(
                        _settings(config, preset, share),
                        recipe=name,
                        seed=seed,
                        out=config.out / preset / label / f"seed-{seed}{part}",
                    )
                    task = Task(
                        config=settings,
                        label=label,
                        share=share,
                        flops_per_token=flops.get(preset, 0.0),
                        questions=config.questions if share == 1 else 0,
                        recipe_hash=hashes[label],
                        data=data,
                    )
                    check_folder(task)
                    tasks.append(known(task, elsewhere, ", ".join(map(str, config.known))))
    return tasks


def _elsewhere(config: CompareConfig) -> dict[tuple[str, str, int, float], RunSummary]:
    """The runs in the files of --known.

    Raises ConfigError if a run is there twice with two results, or if two of a recipe were made with two
    versions of it.
    """
    found: dict[tuple[str, str, int, float], tuple[RunSummary, Path]] = {}
    version: dict[str, str] = {}
    for file in config.known:
        for run in read_lines(file):
            if version.setdefault(run.recipe, run.recipe_hash) != run.recipe_hash:
                raise ConfigError(
                    f"known: runs of {run.recipe} were made with two versions of the recipe, "
                    f"{version[run.recipe]} and {run.recipe_hash}; leave one out"
                )
            first, source = found.setdefault(run.key, (run, file))
            if dataclasses.replace(run, tokens_per_s=first.tokens_per_s, made_on=first.made_on) != first:
                raise ConfigError(
                    f"known: {source} and {file} both have {name_of(run.key)}, with two results "
                    f"({first.text()}; {run.text()}); take it out of one of them"
                )
    return {key: run for key, (run, _) in found.items()}


def _dataset(config: CompareConfig, elsewhere: list[RunSummary]) -> Dataset | str:
    """The data; its digest alone for a report on runs made elsewhere, which needs no more."""
    digests = {found.data for found in elsewhere}
    if config.report_only and len(digests) == 1 and not (config.data / "dataset.json").is_file():
        return digests.pop()
    return Dataset.open(config.data)


def _settings(config: CompareConfig, preset: str, share: float) -> PretrainConfig:
    """The preset's own settings, with a whole schedule for the length of the run."""
    base = preset_defaults(preset)
    whole = config.steps or max(1, base.schedule.steps // 3)
    steps = max(1, round(whole * share))
    return dataclasses.replace(
        base,
        data=config.data,
        device=config.device,
        compile=config.compile,
        graph=on_gpu(config) and config.graph and not config.compile,
        threads=0 if on_gpu(config) else 1,
        batch=dataclasses.replace(
            base.batch,
            batch=config.batch or base.batch.batch,
            sequence=config.sequence or base.batch.sequence,
        ),
        schedule=dataclasses.replace(base.schedule, steps=steps, warmup=max(1, steps // WARMUP)),
        validation=dataclasses.replace(base.validation, val_every=max(1, steps // 8)),
        checkpoint=dataclasses.replace(
            base.checkpoint, save_every=max(1, steps // 2), keep=1 if config.save else 0
        ),
        log=dataclasses.replace(base.log, log_every=max(1, steps // 10)),
    )


def on_gpu(config: CompareConfig) -> bool:
    """Whether the runs compute on a GPU."""
    return pick_device(config.device).type == "cuda"


def flops_per_token(settings: PretrainConfig, dataset: Dataset) -> float:
    """Six times the weights of linear layers and of a token's experts; attention scores are left out."""
    with torch.device("meta"):
        model, report = build_model(settings, dataset, load_recipe("bf16"), torch.device("meta"))
    chosen = int(getattr(model.config, "num_experts_per_tok", 1))
    sizes = ((row.kind, sum(n * k for n, k in row.shapes)) for row in report.resolved.rows)
    return 6.0 * sum(size * (chosen if kind == "experts" else 1) for kind, size in sizes)


def describe(tasks: list[Task], left: list[Task], jobs: int) -> list[str]:
    """The plan and its cost, as lines; `left` are the tasks that are still to run."""
    lines = []
    for preset in dict.fromkeys(task.config.preset for task in tasks):
        mine = [task for task in tasks if task.config.preset == preset]
        longest = max(mine, key=lambda task: task.share)
        lines.append(
            f"{preset}: {len(mine)} runs of up to {longest.config.schedule.steps} steps and "
            f"{longest.tokens:,} tokens, {sum(task.tokens for task in mine):,} in all; "
            f"{longest.flops_per_token / 6e6:.1f} M weights a token"
        )
    work = sum(task.tokens * task.flops_per_token for task in left)
    lines.append(
        f"{len(left)} of {len(tasks)} runs to make, {work:.3g} floating-point operations, {jobs} at a time"
    )
    if left:
        lines.append(_time(tasks, left, jobs))
    return lines


def _time(tasks: list[Task], left: list[Task], jobs: int) -> str:
    """An estimate from the speed of the runs that are done; recipes without one count as the slowest."""
    summaries = [summary for task in tasks if (summary := task.summary()) is not None]
    speed = {(s.preset, s.recipe): s.tokens_per_s for s in summaries if s.tokens_per_s}
    slowest: dict[str, float] = {}
    for (preset, _), value in speed.items():
        slowest[preset] = min(value, slowest.get(preset, value))
    if any(task.config.preset not in slowest for task in left):
        return "no run is done yet whose speed would tell how long that takes"
    seconds = sum(
        task.tokens / speed.get((task.config.preset, task.label), slowest[task.config.preset])
        for task in left
    )
    return f"about {duration(seconds / jobs)} at the speed of the runs that are done"
