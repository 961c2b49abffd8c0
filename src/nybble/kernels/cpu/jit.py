"""How kernels are compiled: lazily, without the interpreter lock, cached on disk where a folder allows."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit


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


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with numba on its first call.

    No fast-math: results are compared bit for bit. No `parallel=True`: `threads.split` spreads work over
    Python threads, which takes less time to compile and is safe with autograd's threads, forks and
    data-loader workers. The cache lives in NUMBA_CACHE_DIR, else beside the source, else in the user's cache
    folder, else nowhere.
    """
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in can be written: compile anew in each process
        return njit(**options)(function)
    index = getattr(compiled._cache, "_cache_file", None)
    if index is not None and hasattr(index, "_source_stamp"):
        index._source_stamp = source_digest()
    return compiled


def helper(function: Callable[..., Any]) -> Any:
    """Compile `function` for use inside kernels; it is linked into them and not cached by itself."""
    return njit(error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
