"""Final losses of recipes over seeds: the same data, order and initial weights, and a table with paired gaps.

    python benchmarks/recipes_cpu.py --data data/sotu --steps 300 --seeds 3 --jobs 2

Each run is `nybble pretrain` in a process of its own with one thread, so that its losses do not depend on
how many run side by side. Prints Markdown: validation loss per seed, the mean, and the mean and deviation of
the paired difference to the baseline (the first recipe).
"""

import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class Config:
    """Recipes x seeds."""

    preset: str = "tiny"
    recipes: tuple[str, ...] = ("bf16", "mxfp8", "inkling", "mxfp4")
    """The first is the baseline of the paired differences."""
    seeds: int = 3
    steps: int = 300
    data: Path = Path("data/sotu")
    out: Path = Path("runs/recipes")
    jobs: int = 2
    """Runs at a time."""


def final_loss(config: Config, recipe: str, seed: int) -> float:
    """Validation loss at the last step, nats a token; a finished run is read, not repeated."""
    run = config.out / f"{recipe}-{seed}"
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not rows or rows[-1]["step"] != config.steps:
        settings = {
            "--recipe": recipe,
            "--data": config.data,
            "--out": run,
            "--steps": config.steps,
            "--seed": seed,
            "--threads": 1,
            "--device": "cpu",
        }
        flags = [str(word) for pair in settings.items() for word in pair]
        command = [sys.executable, "-m", "nybble", "pretrain", config.preset, *flags, "--overwrite"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{recipe}, seed {seed}: {done.stderr.strip()}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(rows[-1]["val_loss"])


def main(config: Config) -> None:
    """Run what is missing, print the table."""
    pairs = [(recipe, seed) for seed in range(config.seeds) for recipe in config.recipes]
    with ThreadPoolExecutor(config.jobs) as pool:
        losses = dict(zip(pairs, pool.map(lambda pair: final_loss(config, *pair), pairs), strict=True))
    base = config.recipes[0]
    seeds = range(config.seeds)
    print(f"| recipe | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | to {base}, paired |")
    print("|---" * (config.seeds + 3) + "|")
    for recipe in config.recipes:
        values = [losses[recipe, seed] for seed in seeds]
        gaps = [losses[recipe, seed] - losses[base, seed] for seed in seeds]
        spread = f" ± {statistics.stdev(gaps):.4f}" if config.seeds > 1 else ""
        gap = "" if recipe == base else f"{statistics.mean(gaps):+.4f}{spread}"
        cells = " | ".join(f"{value:.4f}" for value in values)
        print(f"| `{recipe}` | {cells} | {statistics.mean(values):.4f} | {gap} |")


if __name__ == "__main__":
    main(tyro.cli(Config))
