"""Threads that each take chunks from disk to disk, and memory that they use again.

Fresh memory costs more than the arithmetic on it: the kernel clears every page at its first touch. So a
thread keeps its buffers from chunk to chunk. Torch runs single-threaded inside, as the threads share the
cores already.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Scratch:
    """Buffers of one thread. A tensor that it hands out is valid until the next one of the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary contents."""
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(shape)

    def float32(self, values: Tensor) -> Tensor:
        """The values in FP32, themselves if they are."""
        if values.dtype == torch.float32:
            return values
        return self.empty("float32", tuple(values.shape), torch.float32).copy_(values)


def each_in_threads(tasks: list[Callable[[Scratch], T]]) -> Iterator[T]:
    """Run tasks on as many threads as torch uses and yield their results in order.

    The first error ends it: tasks that have not begun are dropped, and the error is raised.
    """
    threads = torch.get_num_threads()
    local = threading.local()

    def start() -> None:
        torch.set_num_threads(1)
        local.scratch = Scratch()

    def run(task: Callable[[Scratch], T]) -> T:
        return task(local.scratch)

    pool = ThreadPoolExecutor(threads, "nybble-export", start)
    try:
        waiting: deque[Future[T]] = deque(pool.submit(run, task) for task in tasks)
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        # a thread that starts later takes the number that was set last, in whatever thread
        torch.set_num_threads(threads)
