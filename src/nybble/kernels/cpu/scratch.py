"""Memory of tensors that are gone, for those that come: fresh memory costs more than what is computed in it.

An operating system gives memory page by page, on the first touch, and a process gives large blocks back when
it frees them; a training step that makes and forgets the same tensors as the one before pays for all of it
again. Here a tensor's memory comes back when nothing holds the tensor or a view of it any more.
"""

import math
import os
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 13
"""Numbers below which the process keeps memory by itself."""

LARGEST = 1 << 24
"""Numbers above which memory is given back, 64 MiB."""

KEPT = 1 << 27
"""Numbers that may lie idle, 512 MiB; beyond, all that is idle is given back."""

_idle: dict[int, list[Tensor]] = {}
_count = 0
_lock = threading.RLock()  # a collection of garbage may return memory in the midst of a call


def _unlock() -> None:
    """A forked child has none of the threads that may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class _Loan:
    """Memory of the pool as numpy reads it; goes back with the last array on it."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: Tensor, shape: tuple[int, ...]) -> None:
        self.memory = memory
        self.__array_interface__: dict[str, Any] = {
            "data": (memory.data_ptr(), False),
            "shape": shape,
            "typestr": _FLOAT,
            "version": 3,
        }

    def __del__(self) -> None:
        global _count
        with _lock:
            size = self.memory.numel()
            if _count + size > KEPT:
                _idle.clear()
                _count = 0
            _idle.setdefault(size, []).append(self.memory)
            _count += size


_FLOAT = np.dtype(np.float32).str


def _rounded(size: int) -> int:
    """A size that tensors of nearly the same size share: at most an eighth more."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def fresh(*shape: int) -> Tensor:
    """An FP32 tensor on the CPU of `shape` with any content, as `torch.empty` gives it."""
    global _count
    count = math.prod(shape)
    if not SMALLEST <= count <= LARGEST:
        return torch.empty(shape)
    size = _rounded(count)
    with _lock:
        idle = _idle.get(size)
        memory = idle.pop() if idle else None
        if memory is not None:
            _count -= size
    if memory is None:
        memory = torch.empty(size, dtype=torch.float32, device="cpu")
    return torch.from_numpy(np.asarray(_Loan(memory, shape)))


def copied(x: Tensor) -> Tensor:
    """An FP32 tensor on the CPU as it is where it is contiguous, else a copy that is."""
    return x if x.is_contiguous() else fresh(*x.shape).copy_(x)
