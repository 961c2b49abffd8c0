"""How kernels are compiled: lazily, without the interpreter lock, cached on disk where a folder allows."""

import hashlib
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import njit

from nybble.kernels.cpu import crew

INSIDE: dict[str, Any] = {
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""How functions are compiled that only compiled functions call."""


@cache
def source_digest() -> bytes:
    """Digest of every source file of this folder.

    numba renews a cached kernel when its own file changes; kernels link helpers from their neighbours, so
    the stamp must cover all of them.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


class Kernel:
    """A function (first, last, *arguments) that does the work items from first to last, in machine code.

    It is called with a range, or `shared` among torch's threads; neither holds the interpreter's lock.
    """

    def __init__(self, function: Callable[..., Any], stamp: bytes, **options: Any) -> None:
        self.function, self.stamp, self.__name__ = function, stamp, function.__name__
        self.inside = njit(**INSIDE, **options)(function)

    @cached_property
    def entry(self) -> Any:
        """The way in from Python: (team, threads, pieces, begin, end, *arguments), see `crew.share_out`."""
        name, code = f"{self.function.__qualname__}_entry", self.function.__code__
        # as if it were written beside the kernel: there is where numba keeps what it compiled
        code = _entry.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=name, co_qualname=name
        )
        names = {"kernel": self.inside, "share_out": crew.share_out, "__name__": self.function.__module__}
        function = FunctionType(code, names, name)
        function.__module__ = self.function.__module__
        return compiled(function, self.stamp)

    def __call__(self, first: int, last: int, *arguments: Any) -> None:
        self._check(self.entry(0, 1, 1, first, last, *arguments))

    def shared(self, team: int, threads: int, pieces: int, items: int, *arguments: Any) -> None:
        """Call it on `pieces` ranges that together cover `items`; `team` is `team.address()`."""
        self._check(self.entry(team, threads, pieces, 0, items, *arguments))

    def _check(self, failed: bool) -> None:
        if failed:  # all that a kernel can fail in is to find memory for itself
            raise MemoryError(f"no memory for the kernel {self.__name__}")


def _entry(team: int, threads: int, pieces: int, begin: int, end: int, *arguments: Any) -> Any:
    return share_out(kernel, (team, threads, pieces, begin, end), arguments)  # type: ignore[name-defined]  # noqa: F821


def kernel(function: Callable[..., Any]) -> Kernel:
    """`function` as a kernel, compiled on its first call.

    No fast-math: results are compared bit for bit. No `parallel=True`: `threads.split` spreads work over
    torch's own threads, which takes less time to compile and is safe with autograd's threads, forks and
    data-loader workers.
    """
    return Kernel(function, source_digest())


def compiled(function: Callable[..., Any], stamp: bytes) -> Any:
    """`function`, to be compiled on its first call; what a disk holds of it is stale under another stamp.

    The cache lives in NUMBA_CACHE_DIR, else beside the source, else in the user's cache folder, else nowhere.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in can be written: compile anew in each process
        return njit(**options)(function)
    index = getattr(made._cache, "_cache_file", None)
    if index is not None and hasattr(index, "_source_stamp"):
        index._source_stamp = stamp
    return made


def helper(function: Callable[..., Any]) -> Any:
    """Compile `function` for use inside kernels; it is linked into them and not cached by itself."""
    return njit(**INSIDE)(function)
