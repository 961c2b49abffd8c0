"""How kernels are compiled: lazily, without the interpreter lock, cached on disk where a folder allows."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import intp, njit, typeof
from numba._dispatcher import compute_fingerprint

from nybble.kernels.cpu import crew

_log = logging.getLogger(__name__)

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


Team = tuple[int, int]
"""Addresses of what runs threads and of what tells each its number."""


class Kernel:
    """A function (first, last, *arguments) that does the work items from first to last, in machine code.

    It is called with a range, or `shared` among torch's threads; neither holds the interpreter's lock.
    """

    def __init__(self, function: Callable[..., Any], stamp: bytes, **options: Any) -> None:
        self.function = compiled(function, stamp, **INSIDE, **options)
        self._addresses: dict[bytes, int] = {}

    def __call__(self, first: int, last: int, *arguments: Any) -> None:
        self._run((0, 0), 1, 1, first, last, arguments)

    def shared(self, team: Team, threads: int, pieces: int, items: int, *arguments: Any) -> None:
        """Call it on `pieces` ranges that together cover `items`; `team` is `team.addresses()`."""
        self._run(team, threads, pieces, 0, items, arguments)

    def _run(
        self, team: Team, threads: int, pieces: int, begin: int, end: int, arguments: tuple[Any, ...]
    ) -> None:
        kind = compute_fingerprint(arguments)
        address = self._addresses.get(kind) or self._compile(kind, arguments)
        if _share_out(address, *team, threads, pieces, begin, end, *arguments):
            # all that a kernel can fail in is to find memory for itself
            raise MemoryError(f"no memory for the kernel {self.function.__name__}")

    def _compile(self, kind: bytes, arguments: tuple[Any, ...]) -> int:
        """The address of the machine code for arguments of these types."""
        types = (intp, intp, *(typeof(argument) for argument in arguments))
        self.function.compile(types)
        made = self.function.overloads[types]
        address: int = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
        self._addresses[kind] = address
        return address


def kernel(function: Callable[..., Any]) -> Kernel:
    """`function` as a kernel, compiled on its first call.

    No fast-math: results are compared bit for bit. No `parallel=True`: `threads.split` spreads work over
    torch's own threads, which takes less time to compile and is safe with autograd's threads, forks and
    data-loader workers.
    """
    return Kernel(function, source_digest())


def compiled(function: Callable[..., Any], stamp: bytes, **options: Any) -> Any:
    """`function`, to be compiled on its first call; what a disk holds of it is stale under another stamp.

    The cache lives in NUMBA_CACHE_DIR, else beside the source, else in the user's cache folder, else nowhere.
    """
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False} | options
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in can be written: compile anew in each process
        return njit(**options)(function)
    index = getattr(made._cache, "_cache_file", None)
    if index is not None and hasattr(index, "_source_stamp"):
        index._source_stamp = stamp
    save = made._cache.save_overload

    def save_where_it_fits(signature: Any, result: Any) -> None:
        try:
            save(signature, result)
        except OSError as error:  # the kernel itself is there
            _not_kept(str(error.strerror), str(getattr(index, "_cache_path", "")))

    made._cache.save_overload = save_where_it_fits
    return made


@cache
def _not_kept(why: str, folder: str) -> None:
    _log.warning("compiled kernels cannot be kept in %s: %s", folder, why)


def helper(function: Callable[..., Any]) -> Any:
    """Compile `function` for use inside kernels; it is linked into them and not cached by itself."""
    return njit(**INSIDE)(function)


_share_out = compiled(crew.share_out, source_digest())


def kept() -> bool:
    """Whether kernels are kept on a disk, and later processes find them compiled."""
    return getattr(_share_out._cache, "_cache_file", None) is not None
