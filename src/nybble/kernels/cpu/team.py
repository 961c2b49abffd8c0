"""The threads that torch's own operators run on, borrowed: its OpenMP team.

A pool of our own would share the cores with torch's threads, which keep a core busy for a while after each
operator, waiting for the next: our thread would start late, and the caller do all the work alone.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

_forked = False


def _note_fork() -> None:
    """The threads of an OpenMP team do not survive a fork, and the child would wait for them for ever."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@cache
def _parallel() -> tuple[int, int] | None:
    """Where two functions of the OpenMP library are that torch has loaded; None where there is none."""
    maps = Path("/proc/self/maps")  # Linux; elsewhere torch's library has other entry points
    if not maps.exists() or not torch.backends.openmp.is_available():
        return None
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    names = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5")))
    # with two such libraries in the process it is not clear whose threads are torch's
    if len(names) != 1:
        return None
    library = ctypes.CDLL(names[0])
    parallel, number = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.GOMP_parallel, library.omp_get_thread_num)
    )
    return None if parallel is None or number is None else (parallel, number)


def available() -> bool:
    """Whether the team can be used in this process."""
    return not _forked and _parallel() is not None


def addresses() -> tuple[int, int]:
    """Where in memory `GOMP_parallel(body, data, threads, flags)` is, which calls body(data) from each of up
    to so many threads, the caller's among them; and `omp_get_thread_num()`."""
    entries = _parallel()
    assert entries is not None, "available() says whether there is a team"
    return entries
