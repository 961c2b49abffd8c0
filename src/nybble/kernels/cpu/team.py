"""The threads that torch's own operators run on, borrowed: its OpenMP team.

A pool of our own would share the cores with torch's threads, which keep a core busy for a while after each
operator, waiting for the next: our thread would start late, and the caller do all the work alone.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False
_member = threading.local()


def _note_fork() -> None:
    """The threads of an OpenMP team do not survive a fork, and the child would wait for them for ever."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@cache
def _parallel() -> Callable[..., None] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded, or None where there is none to find."""
    maps = Path("/proc/self/maps")  # Linux; elsewhere torch's library has other entry points
    if not maps.exists() or not torch.backends.openmp.is_available():
        return None
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    names = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5")))
    # with two such libraries in the process it is not clear whose threads are torch's
    if len(names) != 1:
        return None
    function = ctypes.CDLL(names[0]).GOMP_parallel
    function.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def available() -> bool:
    """Whether `run` can be called in this process."""
    return not _forked and _parallel() is not None


def address() -> int:
    """Where in memory the library's entry is, of which `run` is the wrapping: parallel(body, data, threads,
    flags)."""
    return ctypes.cast(_parallel(), ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def working() -> bool:
    """Whether the caller is already one of a team: what it calls is its own share."""
    return getattr(_member, "working", False)


def run(work: Callable[[], None], threads: int) -> None:
    """Call `work` from each of up to `threads` threads, the caller's among them; raise what one raised."""
    raised: list[BaseException] = []

    def body(_: int | None) -> None:
        _member.working = True
        try:
            work()
        except BaseException as error:  # a C caller cannot pass it on
            raised.append(error)
        finally:
            _member.working = False

    parallel = _parallel()
    assert parallel is not None, "available() says whether there is a team"
    parallel(_Body(body), None, threads, 0)
    if raised:
        raise raised[0]
