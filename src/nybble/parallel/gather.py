"""Expert weights as packed NVFP4: quantised once by the rank that holds them, gathered at 4.5 bits a value.

A layer whose products take an expert's weights only as NVFP4 codes, or re-rounded from those, does not need
the weights themselves. So FSDP leaves them alone: each rank holds whole experts, sends their codes, and gets
the sum over ranks of their gradients. What arrives is kept for the backward pass, not gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from nybble.layers import Experts
from nybble.layers.experts import local, up_name
from nybble.layers.operand import Codes
from nybble.layers.weights import Weight
from nybble.parallel.mesh import Mesh
from nybble.parallel.wire import Monitor

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def fault(experts: Experts, ranks: int) -> str | None:
    """Why the weights of `experts` cannot be gathered as codes by `ranks`; None if they can."""
    held = local(experts.down_proj).shape[0]
    if held % ranks:
        return f"{ranks} ranks cannot share out {held} experts equally"
    if getattr(experts, "phases", ()):
        return "its precision changes within the run"
    for spec in experts.specs:
        fprop, dgrad = spec.gemms.fprop.w, spec.gemms.dgrad.w
        if fprop.format != "nvfp4" or fprop.outer != "matrix":
            return f"its weights are {fprop.format} in the forward pass"
        if dgrad.source != "forward":
            return "its backward pass rounds the weights themselves"
    return None


def gather_codes(name: str, experts: Experts, mesh: Mesh, monitor: Monitor, *, keep: bool) -> None:
    """Let the ranks of `mesh` that have the same experts hold parts of them. With `keep` what is gathered
    serves all passes of a step."""
    holders, sharers = mesh.holders, mesh.sparse["fsdp"]
    places = [*[Replicate()] * (holders.ndim - 1), Shard(0)]
    for weight in (up_name(experts), "down_proj"):
        whole = getattr(experts, weight)
        mine = local(whole.detach()).chunk(sharers.size())[sharers.get_local_rank()].clone()
        shape = torch.Size((mine.shape[0] * holders["shard"].size(), *mine.shape[1:]))
        shared = DTensor.from_local(
            mine, holders, places, run_check=False, shape=shape, stride=whole.stride()
        )
        setattr(experts, weight, nn.Parameter(shared, requires_grad=whole.requires_grad))
    groups = sharers.get_group(), mesh.sparse["replicate"].get_group()
    experts.gather = CodeGather(name, groups, monitor, keep)


@dataclass(frozen=True)
class CodeGather:
    """The gathers of one layer."""

    layer: str
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    """Ranks that hold parts of each other's experts, and those that hold the same parts."""
    monitor: Monitor
    keep: bool
    _kept: dict[int, tuple[int, Tensor, Codes]] = field(default_factory=dict)
    """By weight: the generation of it, the memory of the shape, and the codes."""

    def __call__(self, experts: Experts, part: Tensor, which: int) -> tuple[Tensor, Codes]:
        """See `layers.experts.Gather`."""
        state = experts.step_state
        generation, base, codes = self._kept.get(which, (-1, None, None))
        if base is None or codes is None or not state.managed or generation != state.generation:
            base, codes = part.new_empty(1), self._gathered(experts, part.detach(), which)
            if self.keep:
                self._kept[which] = state.generation, base, codes
        return _Whole.apply(part, base, *self.groups), codes

    def _gathered(self, experts: Experts, part: Tensor, which: int) -> Codes:
        sharers, count = self.groups[0], part.shape[0]
        before = experts.first_expert + count * dist.get_rank(sharers)
        _, key = experts.step_state.keys(part.device)
        mine = Weight(experts.specs[which], None, None, before).forward_codes(part, key)
        message = torch.cat([t.reshape(count, -1).view(torch.uint8) for t in mine], dim=1)
        whole = message.new_empty(count * dist.get_world_size(sharers), message.shape[1])
        with self.monitor.watch.waiting(f"{self.layer}, weights", part.device):
            _all_gather(whole, message, group=sharers)
        sizes = [t.nbytes // count for t in mine]
        parts = zip(whole.split(sizes, dim=1), mine, strict=True)
        return Codes(*(p.contiguous().view(t.dtype).view(-1, *t.shape[1:]) for p, t in parts))


class _Whole(torch.autograd.Function):
    """[E, N, K] without values, of which a part [e, N, K] is held here: its gradient is summed over ranks."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, base: Tensor, sharers: dist.ProcessGroup, replicas: dist.ProcessGroup
    ) -> Tensor:
        ctx.groups = sharers, replicas
        return base.detach().expand(part.shape[0] * dist.get_world_size(sharers), *part.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sharers, replicas = ctx.groups
        mine = grad.new_empty(grad.shape[0] // dist.get_world_size(sharers), *grad.shape[1:])
        _reduce_scatter(mine, grad.contiguous(), group=sharers)
        if dist.get_world_size(replicas) > 1:
            dist.all_reduce(mine, group=replicas)
        return mine, None, None, None
