"""Whether this process is compiling kernels, for which a first start waits up to a minute.

Told by the stacks of its threads, so that it covers numba, Triton and torch.compile without a hook in any.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPILERS = (
    "numba.core.compiler",
    "triton.backends.nvidia.compiler",
    "triton.backends.amd.compiler",
    "torch._inductor.compile_fx",
)
"""Modules of which functions are on a stack while something is compiled, and not while it is read from a
cache or run."""

LOOK_S = 1.0
LOOKS = 2
"""Looks in a row that must find it: less is not worth a line."""


def compiling() -> bool:
    """Whether a thread of this process is within a compiler."""
    for top in sys._current_frames().values():
        frame = top
        while frame is not None:
            imported = frame.f_code.co_name == "<module>"  # for a second or more, and compiles nothing
            if not imported and str(frame.f_globals.get("__name__")).startswith(COMPILERS):
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """Within it `say` gets one line when kernels are being compiled, so that nobody takes it for a hang.

    Of several ranks on a machine the first says it.
    """
    ended = threading.Event()

    def look() -> None:
        found = 0
        while found < LOOKS and not ended.wait(LOOK_S):
            found = found + 1 if compiling() else 0
        if found == LOOKS:
            say(f"compiling kernels for this machine, up to a minute; {_again()}")

    if os.environ.get("LOCAL_RANK", "0") == "0":
        threading.Thread(target=look, name="nybble-compiling", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _again() -> str:
    kept = getattr(sys.modules.get("nybble.kernels.cpu.jit"), "kept", None)  # None while it is imported
    if kept is not None and not kept():
        return "each start does, as no folder to keep them in can be written: set NUMBA_CACHE_DIR to one"
    return "later starts find them"
