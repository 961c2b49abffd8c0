"""`metrics.jsonl`, one line a step: losses in full, safe against a kill, and exact again after a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from nybble.errors import CheckpointError

TIMING_FIELDS = frozenset({"elapsed_s", "tokens_per_s", "memory_gib", "mfu", "exchange_wait_s"})
"""Fields that differ between two runs of the same settings; all others are equal, bit for bit."""


class MetricsFile:
    """Appends a JSON object a line.

    Each line reaches the system at once, so that a killed process loses none that is finished; `sync` makes
    them outlive a power cut, and is called before each checkpoint.
    """

    def __init__(self, path: Path, keep_steps: int = 0) -> None:
        """Opens `path` for appending, after dropping what lies beyond its first `keep_steps` steps."""
        if path.exists():
            truncate(path, keep_steps)
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: dict[str, Any]) -> None:
        """Writes one step. Floats are written so that reading them back gives the same bits."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def truncate(path: Path, keep_steps: int) -> None:
    """Drops every line whose step is above `keep_steps`, and a line that a kill cut short."""
    with open(path, "rb+") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or _row(path, number, line)["step"] > keep_steps:
                break
            end += len(line)
        file.truncate(end)


def read(path: Path) -> list[dict[str, Any]]:
    """Every finished line of a metrics file."""
    with open(path, "rb") as file:
        return [_row(path, n, line) for n, line in enumerate(file, start=1) if line.endswith(b"\n")]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The row in a finished line. Raises CheckpointError for a line that holds none."""
    try:
        row: dict[str, Any] = json.loads(line)
        row["step"]
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"{path}, line {number} is no row of metrics; delete that line") from None
    return row


def step_line(row: dict[str, Any], steps: int, eta_s: float) -> str:
    """The line of a step for the terminal: loss, rate, norm, balance, speed, memory, time left."""
    width = len(str(steps))
    parts = [f"step {row['step']:>{width}}/{steps}", f"loss {row['loss']:.4f}"]
    parts.append(f"val {row['val_loss']:.4f}" if "val_loss" in row else " " * 10)
    parts += [f"lr {row['lr']:.2e}", f"grad {row['grad_norm']:.2f}"]
    if "load_violation" in row:
        parts.append(f"load +{row['load_violation']:.2f}")
    parts += [
        f"{_si(row['tokens_per_s'])} tok/s",
        *([f"MFU {row['mfu']:.1%} of BF16"] if "mfu" in row else []),
        f"{row['memory_gib']:.1f} GiB",
        *_exchanged(row),
        f"eta {duration(eta_s)}",
    ]
    return "  ".join(parts)


def exchanged(counted: dict[str, float], waited: dict[str, float], tokens: int, ranks: int) -> dict[str, Any]:
    """Entries of a row on the exchanges between ranks, from the sums over ranks of bytes and seconds by leg:
    bytes that left a rank for each token of the step, all layers together; seconds of waiting, the ranks'
    mean."""
    return {
        "exchange_bytes_per_token": {leg: round(count / tokens, 3) for leg, count in counted.items()},
        "exchange_wait_s": {leg: round(seconds / ranks, 4) for leg, seconds in waited.items()},
    }


def _exchanged(row: dict[str, Any]) -> list[str]:
    if "exchange_bytes_per_token" not in row:
        return []
    sent = sum(row["exchange_bytes_per_token"].values())
    return [f"sent {_si(sent)}B/token", f"waited {sum(row['exchange_wait_s'].values()):.2f} s"]


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _si(value: float) -> str:
    for scale, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{suffix}"
    return f"{value:.0f}"
