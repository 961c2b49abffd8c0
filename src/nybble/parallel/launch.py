"""Joining the other ranks of a run that torchrun started, and making sure that all are about the same run."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nybble
from nybble import together
from nybble.errors import ConfigError, ExchangeError, NybbleError
from nybble.parallel.meeting import meet
from nybble.parallel.watch import Watch

GRACE_S = 60.0
"""How much later than the watch the backend gives up by itself."""

_BEGAN = "nybble/began"


@dataclass(frozen=True)
class Start:
    """One start of a job: its launcher repeats the command when a rank has failed, or ranks come or go."""

    again: bool
    """Whether an earlier start began the run, so that this one goes on with it. The launcher's count of
    restarts does not tell: those of several machines count differently, and a start that was refused counts.
    """
    store: dist.Store | None = None
    """Of the launcher, if there is one."""

    def manner(self, folder: Path, resume: bool, overwrite: bool) -> tuple[bool, bool]:
        """(resume, overwrite) for the run in `folder`: a launcher repeats the command of the run's beginning,
        but a later start goes on with what an earlier one began."""
        if self.again and (folder / "config.toml").is_file():
            return True, False
        return resume, overwrite

    def began(self) -> None:
        """Tells later starts that the run has begun."""
        if self.store is not None:
            self.store.set(_BEGAN, "")


@contextmanager
def joined(device: torch.device, watch: Watch, *, slow_s: float, timeout_s: float) -> Iterator[Start]:
    """Within it this process is one of the ranks that the launcher's environment names; alone it is nothing.

    Only rank 0 prints to stdout. `slow_s` and `timeout_s`: after how long a wait for other ranks is reported,
    and after how long it ends the process.
    """
    if not together.launched():
        alone = next(dist.rendezvous("env://"))[0] if dist.is_torchelastic_launched() else None
        yield Start(alone is not None and alone.check([_BEGAN]), alone)
        return
    _check_environment()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    limit = datetime.timedelta(seconds=timeout_s + GRACE_S)
    outer, rank, world = next(dist.rendezvous("env://", timeout=limit))
    store = meet(outer, rank, world, slow_s=slow_s, timeout_s=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    watch.start(_own_store(), rank, world, slow_s=slow_s, timeout_s=timeout_s)
    try:
        with contextlib.ExitStack() as stack:
            if rank != 0:
                nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(nothing))
            yield Start(together.on_main(lambda: outer.check([_BEGAN])), outer)
    except NybbleError as error:
        raise _said_once(error, store, rank) from error.__cause__
    finally:
        watch.close()
        if sys.exc_info()[0] is None:  # after an error the others may never come to the end
            dist.destroy_process_group()


def _check_environment() -> None:
    """OwnError unless a launcher's variables are all there and fit each other."""
    world = os.environ["WORLD_SIZE"]
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
        fits = value != "" if name == "MASTER_ADDR" else value.isdecimal()
        if name == "RANK" and fits:
            fits = int(value) < int(world)
        if not fits:
            raise together.OwnError(
                f"WORLD_SIZE={world} in the environment says that this is one of several ranks, but {name} "
                f"is {value or 'not set'}; start ranks with torchrun, or unset WORLD_SIZE"
            )


def _said_once(error: NybbleError, store: dist.Store, rank: int) -> NybbleError:
    """The error with its rank named, for the first rank that has it: the others end without a word."""
    if isinstance(error, together.OtherRankError):
        return error
    sentence = re.sub(r"^rank \d+: ", "", str(error))
    # Ranks that lose another one say so with addresses of their own.
    thing = "exchange" if isinstance(error, ExchangeError) else hashlib.sha256(sentence.encode()).hexdigest()
    try:
        first = store.add(f"said/{thing}", 1) == 1
    except dist.DistError:  # the store is gone with its process
        first = True
    if not first:
        return together.OtherRankError(f"another rank has said: {sentence}")
    error.args = (f"rank {rank}: {sentence}",)
    return error


@contextmanager
def named_loss(watch: Watch) -> Iterator[None]:
    """Turns what a backend raises when another rank is gone into one sentence with rank and step."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "by peer"))
        if not (together.active() and lost):
            raise
        place = f"rank {dist.get_rank()}: step {watch.step}"
        sentence = f"{place}: an exchange failed, so another rank is gone or late: {error}"
        raise ExchangeError(sentence) from error


def rank_device(device: torch.device) -> torch.device:
    """The GPU of this rank on its machine, where `device` is a GPU."""
    if device.type != "cuda" or not together.launched():
        return device
    _check_environment()
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise together.OwnError(
            f"rank {local} of this machine has no GPU: it has {count}; start so many ranks at most"
        )
    return torch.device("cuda", local)


def check_agreement(facts: dict[str, Any]) -> None:
    """Raises ConfigError on all ranks unless each has the same facts (recipe, data, settings) and the same
    code."""
    if not together.active():
        return
    mine = {"code": code_hash(), "torch": torch.__version__, **facts}
    everyone, rank_here = together.gather(mine), together.rank()
    first = everyone[0]
    for rank, other in enumerate(everyone):
        different = [name for name in first | other if first.get(name) != other.get(name)]
        if different:
            name = different[0]
            if rank_here != 0:
                raise together.OtherRankError("the ranks do not agree; rank 0 says on what")
            raise ConfigError(
                f"rank {rank} does not agree with rank 0 on {', '.join(different)}: {name} is "
                f"{other.get(name)} there and {first.get(name)} on rank 0; start all ranks with the same "
                "code, recipe, data and settings"
            )


@cache
def code_hash() -> str:
    """12 hex digits of all source files of the package."""
    root, digest = Path(nybble.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _own_store() -> dist.Store:
    """A connection of its own to the store of the process group: the watch never waits for the run."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store
