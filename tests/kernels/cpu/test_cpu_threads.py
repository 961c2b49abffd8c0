"""The same bits from any number of threads, from several callers at once, and after a fork."""

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cases import KEY, OPS, difference, hard
from numba import types

from nybble.kernels.cpu import jit, threads

X = hard(300, 700)
OFFS = torch.tensor([50, 50, 130, 300], dtype=torch.int32)


def results() -> list[Any]:
    return [
        OPS.quantize(X, "nvfp4", outer="row"),
        OPS.quantize(X, "mxfp8", -2, offs=OFFS),
        OPS.fake_quantize(X, "mxfp8", torch.float32, -2, "stochastic", key=KEY),
        OPS.fake_quantize(X, "nvfp4-16x16", torch.float32),
    ]


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "MIN_ELEMENTS_PER_THREAD", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_any_number_of_threads() -> None:
    torch.set_num_threads(1)
    alone = results()
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert [difference(a, b) for a, b in zip(results(), alone, strict=True)] == [None] * len(alone)


def test_split_covers_each_item_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for items in (0, 1, 3, 4, 1001):
        seen: list[int] = []
        threads.split(lambda first, last: seen.extend(range(first, last)), items, 1 << 30)  # noqa: B023
        assert sorted(seen) == list(range(items))


def test_failure_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def fail(first: int, last: int) -> None:
        if first < last == 9:
            raise MemoryError("no scratch")

    with pytest.raises(MemoryError, match="no scratch"):
        threads.split(fail, 9, 1 << 30)


def test_without_a_team_a_pool_covers_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's threads cannot be borrowed."""
    monkeypatch.setattr(threads.team, "available", lambda: False)
    test_split_covers_each_item_once(monkeypatch)
    test_failure_in_a_thread_reaches_the_caller(monkeypatch)


_yield = types.ExternalFunction("sched_yield", types.int32())


@jit.kernel
def _meet(first: int, last: int, seen: Any, met: Any) -> None:
    """Waits, for a minute or two at most, for the work on the other of two items to begin."""
    for i in range(first, last):
        seen[i] = 1
        for _ in range(1 << 28):
            if seen[1 - i] == 1:
                met[i] = 1
                break
            _yield()


@jit.kernel
def _too_large(first: int, last: int, out: Any) -> None:
    for i in range(first, last):
        out[i] = np.empty(1 << (40 + out.shape[0]), dtype=np.float32)[i]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="torch's threads are found on Linux only")
@pytest.mark.usefixtures("many_threads")
def test_kernels_run_on_the_threads_of_torch() -> None:
    assert threads.team.available()
    torch.set_num_threads(2)
    seen, met = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    threads.split(_meet, 2, 1 << 30, seen, met)
    assert met.tolist() == [1, 1]


@pytest.mark.usefixtures("many_threads")
def test_a_kernel_without_memory_says_so() -> None:
    for count in (1, 2):
        torch.set_num_threads(count)
        with pytest.raises(MemoryError, match="no memory for the kernel _too_large"):
            threads.split(_too_large, 8, 1 << 30, np.zeros(8, dtype=np.float32))


@pytest.mark.usefixtures("many_threads")
def test_several_callers_at_once() -> None:
    torch.set_num_threads(2)
    expected = results()
    found: SimpleQueue[str | None] = SimpleQueue()

    def call() -> None:
        torch.set_num_threads(2)
        for _ in range(10):
            for ours, theirs in zip(results(), expected, strict=True):
                found.put(difference(ours, theirs))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    answers = [found.get() for _ in range(3 * 10 * len(expected))]
    assert answers == [None] * len(answers)


def _child(connection: Any) -> None:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork; data-loader workers have one too
    torch.get_num_threads = lambda: 2
    connection.send([[t.numpy().tobytes() for t in outputs] for outputs in results()])
    connection.close()


@pytest.mark.usefixtures("many_threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_forked_child_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    expected = [[t.numpy().tobytes() for t in outputs] for outputs in results()]  # starts the pool
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs,))
    child.start()
    theirs.close()
    assert ours.poll(60), "the child hangs"
    answer = ours.recv()
    child.join(60)
    assert child.exitcode == 0
    assert answer == expected
