"""Where the ranks of one start of a job find each other.

torchrun hands the same store to the ranks of every start, and what an earlier start left there is never
removed: a backend that looked would find addresses of dead processes and wait for them. So each start takes a
part of the store that no other has. Rank 0 names it and answers each rank that comes there, since the name of
an earlier start lies in the store too. Counts of restarts would not do for a name: the launchers of several
machines count differently.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator

import torch.distributed as dist

from nybble.together import OwnError

POLL_S = (0.02, 0.5)
"""Seconds between two looks into the store, at first and at most."""
_NAME = "nybble/start"


def meet(store: dist.Store, rank: int, world: int, *, slow_s: float, timeout_s: float) -> dist.Store:
    """The part of `store` that belongs to this start of the job; returns once all ranks are there.

    After `slow_s` stderr says who is missing. Raises OwnError after `timeout_s`.
    """
    mine = uuid.uuid4().hex
    missing = list(range(1, world))
    if rank == 0:
        store.set(_NAME, mine)
        for _ in _looks(lambda: f"rank 0 waits for {_ranks(missing)} to start", slow_s, timeout_s):
            for other in [r for r in missing if store.check([f"{mine}/here/{r}"])]:
                store.set(f"{mine}/answer/{other}", store.get(f"{mine}/here/{other}").decode())
                missing.remove(other)
            if not missing:
                return dist.PrefixStore(mine, store)
    name = ""
    for _ in _looks(lambda: f"rank {rank} waits for rank 0 to start", slow_s, timeout_s):
        if not store.check([_NAME]):
            continue
        if (newest := store.get(_NAME).decode()) != name:
            name = newest
            store.set(f"{name}/here/{rank}", mine)
        answer = f"{name}/answer/{rank}"
        if store.check([answer]) and store.get(answer).decode() == mine:
            return dist.PrefixStore(name, store)
    raise AssertionError("looks end with an error")


def _looks(state: Callable[[], str], slow_s: float, timeout_s: float) -> Iterator[None]:
    """One item a look, with growing pauses between them, until `timeout_s` are over."""
    started, pause, reported = time.monotonic(), POLL_S[0], False
    while (seconds := time.monotonic() - started) < timeout_s:
        if seconds >= slow_s and not reported:
            reported = True
            print(f"slow: {state()}, for {seconds:.0f} s", file=sys.stderr, flush=True)
        yield
        time.sleep(pause)
        pause = min(POLL_S[1], 1.5 * pause)
    raise OwnError(
        f"{state()}, for {timeout_s:.0f} s; look for its own error, or give it longer with --exchange-limit"
    )


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 3, 5`, and of many the first ones."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
