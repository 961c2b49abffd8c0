"""Rewards and mismatch of recipes from one start over several seeds, as a table and a picture.

    python benchmarks/rl_recipes.py runs/demo-sft --steps 40 --jobs 2 --out docs/results/rl-recipes \
        --task arithmetic --level 2 --prompts 24 --rows 192 --max-new-tokens 14 --lr 3e-4 --warmup 3

The last two are a BF16 trainer whose sampler computes as `inkling`, or in NVFP4 throughout: the mismatch that
one quantiser for both avoids. A run is a process of one thread; a finished run is not done again. Runs that
`--report` finds unfinished are compared as far as all have come.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from nybble.analysis.rl_plots import plot_runs
from nybble.pretrain import metrics

CASES = {
    "bf16": ["--recipe", "bf16"],
    "mxfp8": ["--recipe", "mxfp8"],
    "inkling": ["--recipe", "inkling"],
    "bf16, sampler inkling": ["--recipe", "bf16", "--sample-recipe", "inkling"],
    "bf16, sampler nvfp4": ["--recipe", "bf16", "--sample-recipe", "nvfp4-all-naive"],
}
FEW = 5
"""Steps at either end whose mean reward stands in the table."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/rl-recipes"))
    parser.add_argument("--out", type=Path, default=Path("rl-recipes"), help="picture and table, no suffix")
    parser.add_argument("--report", action="store_true", help="run nothing, compare what there is")
    chosen, flags = parser.parse_known_args()  # all others are those of nybble rl
    common = ["--device", "cpu", "--threads", "1", "--steps", str(chosen.steps), "--save-every", "0"]
    common += ["--eval-every", str(chosen.steps), *flags]

    def run(name: str, seed: int) -> list[dict[str, Any]]:
        out = chosen.runs / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
        found = out / "metrics.jsonl"
        if not chosen.report and not (found.is_file() and len(metrics.read(found)) == chosen.steps):
            words = ["rl", str(chosen.model), *CASES[name], "--seed", str(seed), "--out", str(out)]
            command = [sys.executable, "-m", "nybble", *words, "--overwrite", *common]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return metrics.read(found)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        names = [(name, seed) for seed in range(chosen.seeds) for name in CASES]
        found = dict(zip(names, pool.map(lambda job: run(*job), names), strict=True))
    steps = min(map(len, found.values()))
    runs = {name: [found[name, seed][:steps] for seed in range(chosen.seeds)] for name in CASES}
    text = table(runs)
    print(text)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    plot_runs(runs, chosen.out.with_suffix(".png"), title=f"{chosen.model.name}, {steps} steps")


def table(runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> str:
    """A row of Markdown a case."""
    heads = ("recipe", f"first {FEW} steps", f"last {FEW}, by seed", "mean", "held out, greedy")
    heads += ("k3", "largest ratio", "other experts")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, seeds in runs.items():
        rows = [row for one in seeds for row in one]
        ends = [fmean(row["reward"] for row in one[-FEW:]) for one in seeds]
        cells = [
            f"{fmean(row['reward'] for one in seeds for row in one[:FEW]):.3f}",
            " ".join(f"{end:.3f}" for end in ends),
            f"{fmean(ends):.3f}",
            f"{fmean(one[0]['eval_reward_before'] for one in seeds):.3f} to "
            f"{fmean(one[-1]['eval_reward'] for one in seeds):.3f}",
            f"{fmean(row.get('mismatch_k3', 0.0) for row in rows):.1e}",
            f"{max(row.get('mismatch_ratio_max', 1.0) for row in rows):.2f}",
            f"{fmean(row.get('mismatch_experts', 0.0) for row in rows):.1%}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
