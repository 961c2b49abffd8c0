"""Kills ranks of runs under torchrun, and says whether each restart wrote the metrics of an unkilled run.

    python benchmarks/kill_ranks.py --data data/sotu --kills 20 --at-once 2                  # Linux, CPUs
    python benchmarks/kill_ranks.py --data data/sotu --kills 2 --device cuda --preset tiny   # two GPUs

Each run trains with two ranks and is hit once by SIGKILL: one rank, chosen at random, as soon as the run has
written a random number of steps; with none, while ranks are starting and looking for each other. Settings
that follow go to `nybble pretrain`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nybble.pretrain import metrics

RANKS = 2


class Run:
    """One run of two ranks."""

    def __init__(self, out: Path, words: list[str], port: int) -> None:
        self.out = out.resolve()
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, *launcher, "-m", "nybble", "pretrain", *words, "--out", str(self.out)]
        out.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(out.with_suffix(".log"), "wb") as log:
            self.launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(metrics.read(path)) if path.is_file() else 0

    def rows(self) -> list[dict]:
        """What two runs of the same settings have in common."""
        return [
            {name: value for name, value in row.items() if name not in metrics.TIMING_FIELDS}
            for row in metrics.read(self.out / "metrics.jsonl")
        ]

    def worker(self, rank: int) -> int | None:
        """Process of a rank, while there is one."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.out).encode() in words and f"RANK={rank}".encode() in environment:
                return int(process.name)
        return None

    def kill(self, rank: int, after: int, limit_s: float) -> bool:
        """SIGKILL to a rank once `after` steps are written; whether it was there to be hit."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and self.launcher.poll() is None:
            if self.steps() >= after and (process := self.worker(rank)) is not None:
                time.sleep(random.uniform(0, 3) if after == 0 else 0)
                os.kill(process, signal.SIGKILL)
                return True
            time.sleep(0.01)
        return False

    def wait(self, limit_s: float) -> int | None:
        """Status of the launcher; None if it did not end, and was ended."""
        try:
            return self.launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.launcher.terminate()
            self.launcher.wait(60)
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/sotu"))
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of which rank is killed after which step")
    parser.add_argument("--limit", type=float, default=180, help="seconds until a run counts as hung")
    parser.add_argument("--runs", type=Path, default=Path("runs/kills"))
    parser.add_argument("--port", type=int, default=29700)
    chosen, more = parser.parse_known_args()
    words = [
        chosen.preset, "--data", str(chosen.data), "--device", chosen.device, "--steps", str(chosen.steps),
        "--batch", "4", "--sequence", "64", "--save-every", "5", "--val-every", "0", "--val-batches", "1",
        "--threads", "1", "--overwrite", *more,
    ]  # fmt: skip
    whole = Run(chosen.runs / "whole", words, chosen.port)
    if whole.wait(chosen.limit) != 0:
        sys.exit(f"the run that nobody kills failed; see {chosen.runs}/whole.log")
    expected, draw = whole.rows(), random.Random(chosen.seed)
    plan = [(draw.randrange(RANKS), draw.randrange(0, chosen.steps - 1)) for _ in range(chosen.kills)]

    def one(i: int) -> str:
        rank, after = plan[i]
        started = time.monotonic()
        run = Run(chosen.runs / f"killed-{i}", words, chosen.port + 1 + i)
        hit = run.kill(rank, after, chosen.limit)
        killed = time.monotonic()
        status = run.wait(chosen.limit)
        ended = time.monotonic()
        equal = status == 0 and run.rows() == expected
        outcome = "equal" if equal else f"UNLIKE, status {status}"
        line = f"| {i} | {rank} | {after} | {'yes' if hit else 'no'} | {killed - started:.0f} | "
        line += f"{ended - killed:.0f} | {outcome} |"
        print(line, flush=True)
        return outcome

    print("| run | rank | steps before | hit | s to the kill | s from there to the end | metrics |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(chosen.at_once) as pool:
        outcomes = list(pool.map(one, range(chosen.kills)))
    print(f"{outcomes.count('equal')} of {len(outcomes)} restarts wrote the metrics of the unkilled run")


if __name__ == "__main__":
    main()
