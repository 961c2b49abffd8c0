"""How long calls take on a device, beside its ceilings: a large copy and a large matrix product.

A device runs faster cool than warm, so that a call and what it is compared with take turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
REPLAY_MS, MOST_CALLS = 1.0, 20
"""A graph holds as many calls as take about so long, so that what a launch costs hardly counts."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is launched at once, and how many calls that makes."""

    launch: Call
    calls: int
    device: torch.device

    def once(self) -> float:
        """Milliseconds a call, of one launch."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            self.launch()
            return (time.perf_counter() - begin) * 1e3 / self.calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.calls


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A call that a device does as fast as it can, and the bytes moved or operations done by it."""

    timed: Timed
    work: float


def timed(call: Call, device: torch.device, capture: bool = True) -> Timed:
    """`call`, after it was called twice; on a GPU as a graph, to leave out the host, where it can be one."""
    call()
    call()
    single = Timed(launch=call, calls=1, device=device)
    if device.type != "cuda" or not capture:
        return single
    graph = _captured(call, 1)
    if graph is None:
        return single
    one = Timed(launch=graph, calls=1, device=device)
    calls = min(max(math.ceil(REPLAY_MS / one.once()), 1), MOST_CALLS)
    many = _captured(call, calls) if calls > 1 else None
    return one if many is None else Timed(launch=many, calls=calls, device=device)


def in_turns(calls: Sequence[Timed], seconds: float = 0.2) -> list[float]:
    """The median milliseconds of each, launched one after the other until all took `seconds` in the mean."""
    times: list[list[float]] = [[] for _ in calls]
    spent, rounds = 0.0, 0
    while rounds < 5 or (spent < seconds * len(calls) * 1e3 and rounds < 200):
        for call, seen in zip(calls, times, strict=True):
            seen.append(call.once())
            spent += seen[-1] * call.calls
        rounds += 1
    return [statistics.median(seen) for seen in times]


def _captured(call: Call, calls: int) -> Call | None:
    """A graph of that many calls, replayed once; None if it cannot be one."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    return graph.replay


def copy(device: torch.device) -> Ceiling:
    """Bytes, read and written, of a large copy."""
    size = (1 << 31) if device.type == "cuda" else (1 << 27)
    a = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    # Not in a graph: there a copy becomes a node that the copy engines run, at two thirds of the speed.
    return Ceiling(timed=timed(lambda: b.copy_(a), device, capture=False), work=2 * size)


def matrix(device: torch.device) -> Ceiling:
    """Operations of a large matrix product: BF16 on a GPU, FP32 on a CPU, which computes in it."""
    n = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return Ceiling(timed=timed(lambda: a @ b, device), work=2 * n**3)
