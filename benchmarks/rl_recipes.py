"""Rewards and mismatch of recipes from one start over several seeds, as a table and a picture.

    nybble sft nano --task arithmetic --level 2 --steps 260 --lr 3e-3 --out runs/sft
    python benchmarks/rl_recipes.py runs/sft --steps 40 --seeds 3 --jobs 2 --out docs/rl-recipes.png

`apart` is a BF16 trainer whose sampler computes as `inkling` does: the mismatch that one quantiser for both
avoids. A run is a process of one thread; a finished run is not done again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from nybble.analysis.rl_plots import plot_runs
from nybble.pretrain import metrics

CASES = {
    "bf16": ["--recipe", "bf16"],
    "mxfp8": ["--recipe", "mxfp8"],
    "inkling": ["--recipe", "inkling"],
    "apart": ["--recipe", "bf16", "--sample-recipe", "inkling"],
}
LAST = 5
"""Steps whose mean reward is the result of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/rl-recipes"))
    parser.add_argument("--out", type=Path, default=Path("rl-recipes.png"))
    parser.add_argument("flags", nargs="*", help="further flags of nybble rl, after --")
    chosen = parser.parse_args()
    common = ["--device", "cpu", "--threads", "1", "--steps", str(chosen.steps), "--save-every", "0"]
    common += ["--eval-every", str(chosen.steps), *chosen.flags]

    def run(name: str, seed: int) -> Path:
        out = chosen.runs / f"{name}-{seed}"
        done = out / "metrics.jsonl"
        if not (done.is_file() and len(metrics.read(done)) == chosen.steps):
            words = [
                "rl",
                str(chosen.model),
                *CASES[name],
                "--seed",
                str(seed),
                "--out",
                str(out),
                "--overwrite",
            ]
            command = [sys.executable, "-m", "nybble", *words, *common]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return done

    with ThreadPoolExecutor(chosen.jobs) as pool:
        names = [(name, seed) for seed in range(chosen.seeds) for name in CASES]
        found = dict(zip(names, pool.map(lambda job: run(*job), names), strict=True))
    runs = {name: [metrics.read(found[name, s]) for s in range(chosen.seeds)] for name in CASES}
    print("| recipe | first step | last 5, by seed | mean | held out, greedy | k3 | largest ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, seeds in runs.items():
        ends = [fmean(row["reward"] for row in rows[-LAST:]) for rows in seeds]
        cells = [
            f"{fmean(rows[0]['reward'] for rows in seeds):.3f}",
            " ".join(f"{end:.3f}" for end in ends),
            f"{fmean(ends):.3f}",
            f"{fmean(rows[-1]['eval_reward'] for rows in seeds):.3f}",
            f"{fmean(row.get('mismatch_k3', 0.0) for rows in seeds for row in rows):.1e}",
            f"{max(row.get('mismatch_ratio_max', 1.0) for rows in seeds for row in rows):.2f}",
        ]
        print(f"| `{name}` | " + " | ".join(cells) + " |")
    plot_runs(runs, chosen.out, title=f"{chosen.model}, {chosen.steps} steps")


if __name__ == "__main__":
    main()
