"""Losses of one, two and four ranks: plain legs against one process, MXFP8 legs against the spread of seeds.

    python benchmarks/rank_losses.py --data data/sotu --steps 300 --seeds 3 --cores 30

Every run is `nybble pretrain` on CPUs (gloo), with one thread a rank; runs start as cores become free, and
one that is finished is not done again. Legs of 16 or 8 bits round what is FP32 on a CPU; `fp32` legs show
what the order of additions alone does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import tomli_w
import tyro

from nybble.pretrain import metrics
from nybble.recipes import LEGS, load_recipe

SHOWN = (1, 3, 10, 30, 100, 200, 300)
LAST = 50
"""Steps whose mean training loss is shown."""


@dataclass(frozen=True, kw_only=True)
class Config:
    data: Path = Path("data/sotu")
    preset: str = "tiny"
    recipe: str = "inkling"
    steps: int = 300
    sequence: int = 0
    """Tokens of a sequence; 0 is what suits the preset."""
    seeds: int = 3
    cores: int = os.cpu_count() or 1
    runs: Path = Path("runs/rank-losses")
    port: int = 29600
    """First of the ports that launchers listen on."""
    only: tuple[str, ...] = ()
    """Names of the runs to do, in this order, such as `one-0 mxfp8-2-1 bf16-4-0`; none is all."""
    table: bool = False
    """Print the tables of what there is, and run nothing."""


@dataclass(frozen=True)
class Run:
    """One run: its legs, ranks and seed."""

    legs: str
    ranks: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.legs}-{self.ranks}-{self.seed}" if self.ranks > 1 else f"one-{self.seed}"


def plan(config: Config) -> list[Run]:
    """All runs."""
    seeds = range(config.seeds)
    compressed = [Run("mxfp8", ranks, seed) for ranks in (2, 4) for seed in seeds]
    plain = [Run("bf16", 2, 0), Run("bf16", 4, 0), Run("fp32", 2, 0), Run("fp32", 4, 0)]
    return [*(Run("none", 1, seed) for seed in seeds), *compressed, *plain]


def rows(config: Config, run: Run) -> list[dict]:
    path = config.runs / run.name / "metrics.jsonl"
    return metrics.read(path) if path.is_file() else []


class Cores:
    """Hands out cores to runs."""

    def __init__(self, count: int) -> None:
        self.free, self.changed = count, threading.Condition()

    def take(self, count: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.free >= count)
            self.free -= count

    def give(self, count: int) -> None:
        with self.changed:
            self.free += count
            self.changed.notify_all()


def start(config: Config, run: Run, port: int) -> None:
    """One run, from its beginning to its end."""
    recipe = config.runs / f"{run.legs}.toml"
    words = [
        "-m", "nybble", "pretrain", config.preset, "--recipe", str(recipe), "--data", str(config.data),
        "--out", str(config.runs / run.name), "--seed", str(run.seed), "--steps", str(config.steps),
        "--device", "cpu", "--threads", "1", "--save-every", "0",
        "--val-every", "0", "--overwrite",
    ]  # fmt: skip
    if config.sequence:
        words += ["--sequence", str(config.sequence)]
    if run.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks)]
        words = [*launcher, "--master-addr", "127.0.0.1", "--master-port", str(port), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{run.name} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)


def execute(config: Config) -> None:
    """Runs what is not finished."""
    if config.cores < 4:
        sys.exit("the runs of four ranks need four cores")
    config.runs.mkdir(parents=True, exist_ok=True)
    base = load_recipe(config.recipe).to_dict()
    for name in ("none", "fp32", "bf16", "mxfp8"):
        traffic = {} if name == "none" else dict.fromkeys(LEGS, name)
        (config.runs / f"{name}.toml").write_text(tomli_w.dumps(base | {"traffic": traffic}))
    known = {run.name: run for run in plan(config)}
    if unknown := set(config.only) - set(known):
        sys.exit(f"there is no run {', '.join(sorted(unknown))}; runs are {', '.join(known)}")
    chosen = [known[name] for name in config.only or known]
    cores, runs = Cores(config.cores), [r for r in chosen if len(rows(config, r)) < config.steps]

    def one(run: Run, port: int) -> None:
        try:
            started = time.perf_counter()
            start(config, run, port)
            print(f"{run.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        finally:
            cores.give(run.ranks)

    with ThreadPoolExecutor(max(1, len(runs))) as pool:
        for i, run in enumerate(runs):
            cores.take(run.ranks)
            pool.submit(one, run, config.port + i)


def show(config: Config) -> None:
    """Both tables, of the steps that every run has."""
    one = rows(config, Run("none", 1, 0))
    plain = [run for run in plan(config) if run.legs in ("fp32", "bf16") and rows(config, run)]
    print(f"`{config.preset}`, recipe `{config.recipe}`, seed 0: loss of steps, and how far others are off\n")
    print("| step | 1 rank | " + " | ".join(f"{r.ranks} ranks, {r.legs} legs" for r in plain) + " |")
    print("|---|---|" + "---|" * len(plain))
    curves = [rows(config, run) for run in plain]
    for step in [s for s in SHOWN if s <= len(one)]:
        loss = one[step - 1]["loss"]
        cells = [f"{c[step - 1]['loss'] - loss:+.7f}" if step <= len(c) else "" for c in curves]
        print(f"| {step} | {loss:.7f} | " + " | ".join(cells) + " |")
    most = [max(abs(a["loss"] - b["loss"]) for a, b in zip(one, c, strict=False)) for c in curves]
    print("| largest of all | | " + " | ".join(f"{m:.7f}" for m in most) + " |")
    ends = [c[-1]["val_loss"] - one[-1]["val_loss"] if "val_loss" in c[-1] else float("nan") for c in curves]
    print(f"| validation | {one[-1]['val_loss']:.4f} | " + " | ".join(f"{e:+.4f}" for e in ends) + " |")

    print(f"\nvalidation loss at the end, and training loss of the last {LAST} steps\n")
    print("| | " + " | ".join(f"seed {s}" for s in range(config.seeds)) + " | mean | spread (SD) |")
    print("|---|" + "---|" * (config.seeds + 2))
    for what, measure in (
        ("validation", lambda found: found[-1]["val_loss"]),
        ("training", lambda found: fmean(row["loss"] for row in found[-LAST:])),
    ):
        for ranks in (1, 2, 4):
            legs = "none" if ranks == 1 else "mxfp8"
            found = [rows(config, Run(legs, ranks, seed)) for seed in range(config.seeds)]
            values = [measure(each) for each in found if len(each) == config.steps]
            if len(values) < 2:
                continue
            label = "1 rank" if ranks == 1 else f"{ranks} ranks, MXFP8 legs"
            cells = " | ".join(
                f"{measure(each):.4f}" if len(each) == config.steps else "unfinished" for each in found
            )
            print(f"| {what}, {label} | {cells} | {fmean(values):.4f} | {stdev(values):.4f} |")


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if not config.table:
        execute(config)
    show(config)


if __name__ == "__main__":
    main()
