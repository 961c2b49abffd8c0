"""Memory of tensors that are gone serves those that come, and no tensor that is still there."""

import multiprocessing
import threading

import pytest
import torch

from nybble.kernels.cpu import scratch
from nybble.kernels.cpu.scratch import fresh


def test_memory_comes_back_with_the_last_view_of_a_tensor() -> None:
    first = fresh(300, 401)
    place, view = first.data_ptr(), first[7:].view(-1)
    del first
    assert fresh(300, 401).data_ptr() != place
    view.fill_(3.0)
    del view
    again = fresh(401, 300)
    assert again.data_ptr() == place
    assert again.shape == (401, 300)
    assert again.is_contiguous()
    assert place % 64 == 0


def test_a_gradient_keeps_its_memory_until_it_is_dropped() -> None:
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(_ctx: object, _dy: torch.Tensor) -> torch.Tensor:
            return fresh(200, 200).fill_(1.0)

    weight = torch.nn.Parameter(torch.zeros(200, 200))
    Ones.apply(weight).backward()
    assert weight.grad is not None
    others = [fresh(200, 200).fill_(2.0) for _ in range(4)]
    assert (weight.grad == 1.0).all()
    place = weight.grad.data_ptr()
    weight.grad = None
    assert fresh(200, 200).data_ptr() == place
    assert len(others) == 4


def test_what_lies_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch._idle.clear()
    monkeypatch.setattr(scratch, "_count", 0)
    monkeypatch.setattr(scratch, "KEPT", 3 << 16)
    tensors = [fresh(1 << 16) for _ in range(9)]
    del tensors
    assert sum(len(idle) for idle in scratch._idle.values()) <= 3
    huge = [fresh(1 << 13, 1 << 12) for _ in range(2)]
    del huge
    assert sum(len(idle) for idle in scratch._idle.values()) <= 3
    assert fresh(0, 7).shape == (0, 7)


def test_threads_share_it() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            x = fresh(100, 100).fill_(mark)
            if not (x == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with scratch._lock:
            held.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = multiprocessing.get_context("fork").Process(target=fresh, args=(100, 100))
    child.start()
    child.join(20)
    forked.set()
    thread.join()
    child.kill()
    child.join()
    assert child.exitcode == 0
