"""What all ranks of a run do together; in a run of one process each call does the plain thing.

A step that can fail on one rank alone must not leave the others waiting for it: `on_main` and `all_or_none`
tell every rank how it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from nybble.errors import NybbleError

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long a rank waits for another to say what is wrong."""


class OtherRankError(NybbleError):
    """Another rank failed, and says why itself."""


class OwnError(NybbleError):
    """A problem of this rank that the others of its machine need not have."""


def another_says(error: BaseException) -> bool:
    """Whether the word is another rank's, because it failed, or because all have the same error.

    This process stays for a while then: torchrun ends all ranks as soon as one has ended, also one that was
    about to speak.
    """
    if isinstance(error, OtherRankError):
        time.sleep(PATIENCE_S)
        return True
    alone = not launched() or dist.is_initialized() or isinstance(error, OwnError)
    if not alone and os.environ.get("LOCAL_RANK", "0") != "0":
        # What is wrong before ranks join is wrong for all: the first of this machine says it. Whoever is
        # still there after that has an error that the first has not.
        time.sleep(PATIENCE_S)
    return False


def active() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if active() else 0


def world() -> int:
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """True on the one rank that writes files and prints."""
    return rank() == 0


def on_main(action: Callable[[], T]) -> T:
    """The result of `action` on rank 0, which alone runs it, on all ranks; its error is raised on all.

    Results travel as pickles between the processes of one run.
    """
    if not active():
        return action()
    outcome: list[object] = [None, None]
    error: BaseException | None = None
    if is_main():
        try:
            outcome[0] = action()
        except BaseException as caught:
            error, outcome[1] = caught, f"rank 0: {caught}"
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise OtherRankError(str(outcome[1]))
    return outcome[0]  # type: ignore[return-value]


def all_or_none(action: Callable[[], T]) -> T:
    """The result of `action`, which every rank runs for itself; where it fails on one, all raise."""
    if not active():
        return action()
    result: T | None = None
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as caught:
        error = caught
    faults = gather(None if error is None else str(error))
    if error is not None:
        raise error
    for where, fault in enumerate(faults):
        if fault is not None:
            raise OtherRankError(f"rank {where}: {fault}")
    return result  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Every rank's value, in order."""
    if not active():
        return [value]
    everyone: list[T] = [value] * world()
    dist.all_gather_object(everyone, value)
    return everyone


def total(values: Sequence[float], device: torch.device | None = None) -> list[float]:
    """Sums of numbers over ranks, in FP64."""
    if not active():
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def largest(value: int, device: torch.device | None = None) -> int:
    """The largest of the ranks' numbers."""
    if not active():
        return value
    most = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
