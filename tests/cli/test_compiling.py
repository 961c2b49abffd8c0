"""A first start that compiles kernels says so once; one that finds them compiled says nothing."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from nybble import compiling
from nybble.kernels.cpu import jit


def within(module: str, seconds: float) -> Callable[[], None]:
    """A function of a module of that name which takes so long."""
    space: dict[str, Any] = {"__name__": module, "sleep": time.sleep, "seconds": seconds}
    exec("def busy():\n    sleep(seconds)", space)
    return space["busy"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LOOK_S", 0.02)


@pytest.mark.parametrize("module", ["numba.core.compiler", "triton.backends.nvidia.compiler"])
def test_a_compiler_that_takes_long_is_told_once(module: str) -> None:
    said: list[str] = []
    with compiling.told(said.append):
        for _ in range(3):
            within(module, 0.2)()
    assert said == ["compiling kernels for this machine, up to a minute; later starts find them"]


def test_caches_launches_and_short_compilers_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LOOK_S", 0.1)
    said: list[str] = []
    with compiling.told(said.append):
        within("numba.core.compiler", 0.05)()
        within("numba.core.caching", 0.3)()
        within("triton.backends.nvidia.driver", 0.3)()
    assert not said


def test_a_compiler_that_is_imported_is_not_told() -> None:
    said: list[str] = []
    with compiling.told(said.append):
        exec("sleep(0.2)", {"__name__": "numba.core.compiler", "sleep": time.sleep})
    assert not said


def test_a_compiler_at_work_is_told_while_kernels_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(jit, "kept")
    said: list[str] = []
    with compiling.told(said.append):
        within("numba.core.compiler", 0.2)()
    assert said[0].endswith("later starts find them")


def test_of_several_ranks_the_first_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    said: list[str] = []
    with compiling.told(said.append):
        within("numba.core.compiler", 0.1)()
    assert not said


def test_where_nothing_can_be_kept_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kept", lambda: False)
    said: list[str] = []
    with compiling.told(said.append):
        within("numba.core.compiler", 0.2)()
    assert "each start does, as no folder to keep them in can be written: set NUMBA_CACHE_DIR" in said[0]


def test_numbas_compiler_is_recognised_at_work() -> None:
    def total(first: int, last: int, out: Any) -> None:
        for i in range(first, last):
            out[i] += np.sqrt(out[i]) + i

    seen: list[bool] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(compiling.compiling())
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    numba.njit(total)(0, 3, np.ones(3))
    done.set()
    thread.join()
    assert any(seen)
    assert not compiling.compiling()
