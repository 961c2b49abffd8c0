"""The clock of `nybble bench`: medians, calls of a launch counted, and a kernel and its ceiling in turns."""

import time
from collections.abc import Callable

import pytest
import torch

from nybble.analysis import clock

CPU = torch.device("cpu")


class Told(clock.Timed):
    """Takes 50 ms a call, as it is told."""

    def once(self) -> float:
        self.launch()
        return 50.0


def told(launch: Callable[[], object] = lambda: None, calls: int = 1) -> clock.Timed:
    return Told(launch=launch, calls=calls, device=CPU)


def test_calls_take_turns():
    order: list[str] = []
    assert clock.in_turns([told(lambda n=n: order.append(n)) for n in ("kernel", "copy")]) == [50.0, 50.0]
    assert order == ["kernel", "copy"] * 5


@pytest.mark.parametrize(
    ("calls", "seconds", "rounds"), [(1, 0.5, 10), (1, 1.0, 20), (5, 2.5, 10), (1, 0.0, 5)]
)
def test_turns_end_when_the_time_is_up(calls, seconds, rounds):
    launches: list[int] = []
    clock.in_turns([told(lambda: launches.append(1), calls), told(calls=calls)], seconds)
    assert len(launches) == rounds


def test_the_median_is_told():
    times = iter([9.0, 1.0, 2.0, 3.0, 100.0])

    class Script(clock.Timed):
        def once(self) -> float:
            return next(times)

    assert clock.in_turns([Script(launch=lambda: None, calls=1, device=CPU)], seconds=0.0) == [3.0]


def test_a_launch_of_many_calls_is_shared_out():
    ms = clock.Timed(launch=lambda: time.sleep(0.02), calls=10, device=CPU).once()
    assert 2.0 <= ms < 20.0


def test_a_call_is_made_twice_before_it_is_timed():
    calls: list[int] = []
    assert clock.timed(lambda: calls.append(1), CPU).calls == 1
    assert len(calls) == 2


@pytest.mark.parametrize("several", [True, False])
def test_a_graph_of_one_call_is_kept_where_more_cannot_be_captured(several, monkeypatch):
    def replay() -> None:
        time.sleep(0.001)

    monkeypatch.setattr(clock.Timed, "once", lambda _: 0.1)
    monkeypatch.setattr(clock, "_captured", lambda _, n: replay if n == 1 or several else None)
    found = clock.timed(lambda: None, torch.device("cuda"))
    assert (found.launch, found.calls) == (replay, 10 if several else 1)


def test_ceilings_count_what_they_do():
    copy, matrix = clock.copy(CPU), clock.matrix(CPU)
    copied, product = copy.timed.launch(), matrix.timed.launch()
    assert isinstance(copied, torch.Tensor)
    assert copy.work == 2 * copied.numel() * copied.element_size()
    assert len(copied.unique()) == 256
    assert isinstance(product, torch.Tensor)
    assert matrix.work == 2 * product.shape[0] * product.shape[1] * 1024
    assert 30 < product.std() < 34  # sums of 1024 products of normal numbers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_holds_the_calls_that_it_counts():
    x = torch.zeros(1, device="cuda")
    timed = clock.timed(lambda: x.add_(1), x.device)
    before = x.item()
    timed.launch()
    assert x.item() - before == timed.calls > 1
    assert 0 < clock.in_turns([timed])[0] < 0.1
