"""Who hangs where: reports of slow, hung and dead ranks, and where the watch keeps silent."""

import json
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from nybble.parallel import ticks
from nybble.parallel import watch as module
from nybble.parallel.watch import Watch


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "DEAD_S", 0.4)
    monkeypatch.setattr(module, "STOP_S", 0.2)


@pytest.fixture
def watched():
    """A watch over rank 0 of 2, the store, and the reports that would have ended the process."""
    store, ends, watch = dist.HashStore(), [], Watch()

    def begin(slow_s: float, timeout_s: float) -> tuple[Watch, dist.Store, list[str]]:
        watch.start(store, 0, 2, slow_s=slow_s, timeout_s=timeout_s, end=ends.append)
        watch.begin(12)
        return watch, store, ends

    yield begin
    watch.close()


def beat(store: dist.Store, n: int, at: str = "step 12, layer 3, dispatch") -> None:
    store.set("watch/1", json.dumps({"beat": n, "at": at, "for_s": 1.0}))


def test_a_slow_exchange_is_reported_once_with_its_place(watched, capsys):
    watch, store, ends = watched(0.1, 60)
    with watch.waiting("layer 3, combine"):
        for n in range(15):
            beat(store, n)
            time.sleep(0.02)
    text = capsys.readouterr().err
    assert text.count("slow: rank 0: step 12, layer 3, combine for") == 1
    assert "rank 1: step 12, layer 3, dispatch for 1 s" in text
    assert not ends


def test_a_slow_exchange_with_a_silent_rank_says_so(watched, monkeypatch, capsys):
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    monkeypatch.setattr(module, "DEAD_S", 2.0)
    watch, store, ends = watched(0.8, 60)
    beat(store, 1)
    with watch.waiting("layer 3, combine"):
        time.sleep(1.0)
    assert "; rank 1: not heard of for 0 s, last at step 12, layer 3, dispatch\n" in capsys.readouterr().err
    assert not ends


def test_of_several_slow_ranks_one_reports(watched, capsys):
    watch, store, ends = watched(0.1, 60)
    other = Watch()
    other.start(store, 1, 2, slow_s=0.1, timeout_s=60, end=ends.append)
    other.begin(12)
    with watch.waiting("layer 3, combine"), other.waiting("layer 3, combine"):
        time.sleep(0.4)
    other.close()
    text = capsys.readouterr().err
    assert text.count("slow: ") == 1
    assert "rank 0: step 12, layer 3, combine for" in text
    assert "rank 1: step 12, layer 3, combine for" in text
    assert not ends


def test_a_hung_exchange_ends_the_process(watched):
    watch, store, ends = watched(0.1, 0.3)
    with watch.waiting("layer 3, combine"):
        for n in range(40):
            beat(store, n)
            time.sleep(0.02)
    assert len(ends) == 1
    assert "step 12, layer 3, combine" in ends[0]
    assert "the limit is reached" in ends[0]


def test_a_dead_rank_is_named(watched):
    watch, store, ends = watched(60, 600)
    beat(store, 7)
    with watch.waiting("layer 3, combine"):
        time.sleep(1.2)
    assert len(ends) == 1
    assert "step 12, layer 3, combine: rank 1, last at step 12, layer 3, dispatch, has not been" in ends[0]


@pytest.fixture
def told_to_stop():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_between_exchanges_a_rank_told_to_stop_does_not_wait_for_a_dead_one(watched, told_to_stop):
    """There it may be inside of a step's other collectives, which NCCL lets wait for ever."""
    _, store, ends = watched(60, 600)
    told_to_stop()
    for n in range(30):
        beat(store, n)
        time.sleep(0.02)
    assert not ends
    time.sleep(0.6)
    assert len(ends) == 1
    assert "step 12, between exchanges: rank 1, last at" in ends[0]


def test_a_wait_ends_when_it_was_told_to_and_does_not_come_to_an_end(watched, told_to_stop):
    watch, _, ends = watched(60, 600)
    told_to_stop()
    time.sleep(0.4)
    assert not ends  # it computes, and will save
    with watch.waiting("layer 3, combine"):
        time.sleep(0.6)
    assert len(ends) == 1
    assert "step 12, layer 3, combine for" in ends[0]
    assert "told to stop" in ends[0]


def test_a_rank_that_computes_for_long_is_left_alone(watched):
    _, store, ends = watched(0.1, 0.3)
    for n in range(40):
        beat(store, n)
        time.sleep(0.02)
    assert not ends
    assert json.loads(store.get("watch/0"))["at"] == "step 12, between exchanges"


def test_a_rank_that_compiles_says_so(watched, capsys, monkeypatch):
    monkeypatch.setattr(module, "COMPILING_S", 0.05)
    monkeypatch.setattr(module, "compiling", lambda: True)
    _, store, ends = watched(0.1, 60)
    for n in range(20):
        beat(store, n)
        time.sleep(0.02)
    assert (
        capsys.readouterr().err.count("slow: rank 0: step 12, between exchanges, compiling kernels for") == 1
    )
    assert json.loads(store.get("watch/0"))["at"] == "step 12, between exchanges, compiling kernels"
    assert not ends


def test_progress_is_no_slowness(watched, capsys):
    watch, store, ends = watched(0.2, 0.3)
    for n in range(20):
        beat(store, 0)  # the other one's heart stands still, but this rank gets further
        with watch.waiting(f"layer {n}, combine"):
            time.sleep(0.03)
    assert not ends
    assert not capsys.readouterr().err


def test_ticks_are_reached_in_order_and_beyond_their_numbers(monkeypatch):
    monkeypatch.setattr(ticks, "NUMBERS", 8)
    counter = ticks.Ticks(torch.device("cpu"))  # which has no queue: a tick is reached at once
    named = [counter.queue() for _ in range(20)]
    assert all(counter.reached(tick) for tick in named[-4:])
    assert not counter.reached((named[-1] + 1) % 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_that_is_stuck_and_full_does_not_hold_up_the_watch():
    watch, device, stop = Watch(), torch.device("cuda"), threading.Event()
    x, answers = torch.zeros(8, device=device), []

    def ask() -> None:
        while not stop.wait(0.02):
            started = time.monotonic()
            _, _, waits = watch.position()
            answers.append((time.monotonic() - started, waits))

    thread = threading.Thread(target=ask)
    for cycles in (1, 4_000_000_000):  # two seconds; what is made once is there by then
        torch.cuda._sleep(cycles)
        with watch.waiting("layer 3, combine", device):
            pass
        if cycles == 1:
            torch.cuda.synchronize()
            thread.start()
    started = time.monotonic()
    for _ in range(4000):
        x.add_(1)
    held_up = time.monotonic() - started
    torch.cuda.synchronize()
    waits = watch.position()[2]
    stop.set()
    thread.join()
    assert held_up > 0.5
    assert max(seconds for seconds, _ in answers) < 0.3
    assert any(waited for _, waited in answers)
    assert not waits
