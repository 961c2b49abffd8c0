"""What the legs of a step cost: bytes that left this rank, and time spent waiting for them to arrive."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nybble.recipes import LEGS

EXCHANGES = ("sizes", "routing", *LEGS, "routing_backward")
"""All exchanges of a layer: how many rows, which experts and weights, the four legs, gradients of weights."""


class Meter:
    """Adds up bytes and seconds by leg until they are taken."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def sent(self, leg: str, count: int) -> None:
        """`count` bytes go to other ranks."""
        self._bytes[leg] += count

    @contextmanager
    def waiting(self, leg: str, device: torch.device) -> Iterator[None]:
        """Time of a leg: of this thread on a CPU, of the stream on a GPU, where this thread does not wait."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((leg, before, after))
        else:
            started = time.perf_counter()
            yield
            self._seconds[leg] += time.perf_counter() - started

    def take(self) -> tuple[dict[str, int], dict[str, float]]:
        """(bytes, seconds) of every exchange since the last call. Waits for the GPU."""
        for leg, before, after in self._events:
            after.synchronize()
            self._seconds[leg] += before.elapsed_time(after) / 1000
        counted = {leg: self._bytes[leg] for leg in EXCHANGES}
        waited = {leg: self._seconds[leg] for leg in EXCHANGES}
        self._bytes.clear()
        self._seconds.clear()
        self._events.clear()
        return counted, waited
