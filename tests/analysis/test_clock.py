"""The clock of `nybble bench`: medians, calls of a launch counted, and a kernel and its ceiling in turns."""

import time

import pytest
import torch

from nybble.analysis import clock

CPU = torch.device("cpu")


class Told(clock.Timed):
    """Takes the times that it is told, and notes when."""

    def once(self) -> float:
        self.launch()
        return 50.0


def test_calls_take_turns():
    order: list[str] = []
    calls = [Told(launch=lambda n=n: order.append(n), calls=1, device=CPU) for n in ("kernel", "copy")]
    assert clock.in_turns(calls) == [50.0, 50.0]
    assert order == ["kernel", "copy"] * (len(order) // 2)
    assert len(order) >= 10


def test_the_median_is_told():
    times = iter([9.0, 1.0, 2.0, 3.0, 100.0, *[2.5] * 200])

    class Script(clock.Timed):
        def once(self) -> float:
            return next(times)

    assert clock.in_turns([Script(launch=lambda: None, calls=1, device=CPU)], seconds=0.0) == [3.0]


def test_a_launch_of_many_calls_is_shared_out():
    ms = clock.Timed(launch=lambda: time.sleep(0.02), calls=10, device=CPU).once()
    assert 2.0 <= ms < 20.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_holds_the_calls_that_it_counts():
    x = torch.zeros(1, device="cuda")
    timed = clock.timed(lambda: x.add_(1), x.device)
    before = x.item()
    timed.launch()
    assert x.item() - before == timed.calls == clock.MOST_CALLS
    assert 0 < clock.in_turns([timed])[0] < 0.1


def test_ceilings_count_what_they_do():
    assert clock.copy(CPU).work == 2 * (1 << 27)
    assert clock.matrix(CPU).work == 2 * 1024**3
