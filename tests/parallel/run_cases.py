"""Whole runs of `nybble pretrain` on several ranks; each function runs on every rank."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

import micro

from nybble.commands import pretrain as command
from nybble.pretrain import loop


def pretrain(words: list[str], kill_at: int = -1) -> int:
    """`nybble pretrain WORDS`; the last rank is killed at the beginning of step `kill_at`."""
    micro.add_preset()
    if kill_at >= 0 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        once = loop.train_step

        def train_step(session: Any, step: int) -> Any:
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return once(session, step)

        loop.train_step = train_step
    return command.main(words)


def with_own_recipe(first: list[str], others: list[str]) -> int:
    """`nybble pretrain` with other words on ranks above 0."""
    return pretrain(first if os.environ["RANK"] == "0" else others)


def with_poison(words: list[str]) -> int:
    """`nybble pretrain WORDS`; gathered weights are NaN as soon as FSDP gives their memory back, so that who
    reads them behind its back is found however small they are."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state
    from torch.utils._pytree import tree_leaves

    once = _fsdp_param.free_storage

    def leaves(output: Any) -> list[Any]:
        """Outputs whose gradient gathers weights again, as torch 2.11 finds them: in no dataclass."""
        return [x for x in tree_leaves(output) if getattr(x, "requires_grad", False)]

    def free_storage(tensor: Any) -> None:
        tensor.untyped_storage().fill_(0xFF)
        once(tensor)

    _fsdp_param.free_storage = free_storage
    if hasattr(_fsdp_state, "collect_grad_tensors"):
        _fsdp_state.collect_grad_tensors = leaves
    return pretrain(words)
