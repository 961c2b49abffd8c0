"""Ranks of one start of a job find each other, whatever earlier starts left in the launcher's store."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
import torch.distributed as dist

from nybble.errors import NybbleError
from nybble.parallel import Monitor
from nybble.parallel.launch import joined
from nybble.parallel.meeting import meet

LIMITS = {"slow_s": 20.0, "timeout_s": 20.0}


def met(store: dist.Store, world: int, late: int | None = None) -> list[dist.Store]:
    """What `meet` gives to each rank; rank `late` comes last."""

    def one(rank: int) -> dist.Store:
        time.sleep(0.2 if rank == late else 0.0)
        return meet(store, rank, world, **LIMITS)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_no_rank_sees_what_an_earlier_start_left(late):
    store = dist.HashStore()
    for start in range(3):
        parts = met(store, 3, late)
        assert not parts[late].check(["address"])
        parts[0].set("address", str(start))
        assert [part.get("address") for part in parts] == [str(start).encode()] * 3


def test_missing_ranks_are_named(capsys):
    with pytest.raises(NybbleError, match=r"rank 0 waits for ranks 1, 2 to start, for 0 s"):
        meet(dist.HashStore(), 0, 3, slow_s=0.05, timeout_s=0.3)
    assert "slow: rank 0 waits for ranks 1, 2 to start" in capsys.readouterr().err
    with pytest.raises(NybbleError, match="rank 1 waits for rank 0 to start"):
        meet(dist.HashStore(), 1, 3, slow_s=9, timeout_s=0.1)


def sum_of_ones(late: str, dies: bool) -> float:
    """Joins the job, adds a one, and may die as one that was killed."""
    time.sleep(0.5 if os.environ["RANK"] == late else 0.0)
    with joined(torch.device("cpu"), Monitor().watch, **LIMITS):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if dies:
            os._exit(9)
        return float(ones)


def test_a_restart_does_not_wait_for_addresses_of_dead_ranks():
    """As under torchrun, whose store outlives the ranks: whichever of them is first finds old addresses."""
    _store, environment = ranks.launcher()
    killed = ranks.start(2, sum_of_ones, "", True, **environment).wait(120)
    assert killed == [(False, 9), (False, 9)]
    for late in ("0", "1"):
        assert ranks.start(2, sum_of_ones, late, False, **environment).wait(120) == [(True, 2.0)] * 2


def begins() -> bool:
    """Begins a run, unless an earlier start has: whether that is so."""
    with joined(torch.device("cpu"), Monitor().watch, **LIMITS) as start:
        start.began()
        return start.again


@pytest.mark.parametrize("world", [1, 2])
def test_a_start_knows_whether_an_earlier_one_began(world):
    _store, environment = ranks.launcher()
    for again in (False, True):
        job = ranks.start(world, begins, **environment, TORCHELASTIC_RUN_ID="7")
        assert job.wait(120) == [(True, again)] * world


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"WORLD_SIZE": "all"}, "but WORLD_SIZE is all"),
        ({"RANK": ""}, "but RANK is not set; start ranks with torchrun, or unset WORLD_SIZE"),
        ({"RANK": "2"}, "but RANK is 2"),
        ({"LOCAL_RANK": "-1"}, "but LOCAL_RANK is -1"),
        ({"MASTER_ADDR": ""}, "but MASTER_ADDR is not set"),
        ({"MASTER_PORT": "http"}, "but MASTER_PORT is http"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused(monkeypatch, changed, sentence):
    usual = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in (usual | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NybbleError, match=sentence), joined(torch.device("cpu"), Monitor().watch, **LIMITS):
        pass
