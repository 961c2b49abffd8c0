"""How far a GPU's stream has come, told without asking the GPU.

An event is asked through CUDA, and CUDA does not answer any thread while one of them waits for room in a
stream that is stuck; in Python that thread then keeps all others from running. So the stream itself writes
numbers into the host's memory.
"""

from __future__ import annotations

import torch

NUMBERS = 1 << 16
"""Ticks are counted modulo this: far more than ever are under way."""


class Ticks:
    """The ticks of the current stream of one device; each is reached after everything queued before it."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.arange(NUMBERS, device=device)
        reached = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._reached, self._count = reached, 0
        self._seen = reached.numpy()

    def queue(self) -> int:
        """Queues the next tick, and names it."""
        self._count = (self._count + 1) % NUMBERS
        self._reached.copy_(self._numbers[self._count : self._count + 1], non_blocking=True)
        return self._count

    def reached(self, tick: int) -> bool:
        """Whether the stream has come to `tick`. Any thread may ask, at any time."""
        return (int(self._seen[0]) - tick) % NUMBERS < NUMBERS // 2
