"""Spread a kernel over threads: it is called on ranges of work items, with the interpreter lock released."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from nybble.kernels.cpu import team
from nybble.kernels.cpu.jit import Kernel

# Below this many elements for each thread, handing work over costs more than it saves.
MIN_ELEMENTS_PER_THREAD = 1 << 15

# Large calls are dealt out in pieces of about this size, so that a slow thread takes fewer.
ELEMENTS_PER_PIECE = 1 << 17

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_threads = 0


def _forget_pool() -> None:
    """A forked child inherits the pool's object but none of its threads."""
    global _pool, _pool_threads, _lock
    _pool, _pool_threads, _lock = None, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _executor(threads: int) -> ThreadPoolExecutor:
    global _pool, _pool_threads
    with _lock:
        if _pool is None or _pool_threads < threads:
            # The former pool finishes what other callers gave it; its threads end with it.
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="nybble")
            _pool_threads = threads
        return _pool


def split(function: Callable[..., Any], items: int, elements: int, *arguments: Any) -> None:
    """Call `function(first, last, *arguments)` on ranges that together cover `items` work items.

    `elements` is the total work, `torch.get_num_threads()` the most threads used. The caller's thread takes
    part, and takes all where the others are late: nothing waits for a thread that has not begun.
    """
    threads = min(torch.get_num_threads(), items, max(1, elements // MIN_ELEMENTS_PER_THREAD))
    if threads <= 1:
        if items:
            function(0, items, *arguments)
        return
    pieces = min(items, max(threads, min(8 * threads, elements // ELEMENTS_PER_PIECE)))
    if isinstance(function, Kernel) and team.available():
        function.shared(team.addresses(), threads, pieces, items, *arguments)
        return
    left = iter(range(pieces))  # advancing it is atomic: each piece goes to one thread

    def work() -> None:
        for i in left:
            function(items * i // pieces, items * (i + 1) // pieces, *arguments)

    pool = _executor(threads - 1)
    helpers = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()
