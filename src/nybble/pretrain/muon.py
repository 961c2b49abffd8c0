"""Muon for matrices of which ranks may hold parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

RATE = "match_rms_adamw"


class Muon(torch.optim.Muon):
    """torch's Muon with the update scaled to AdamW's RMS; one that is distributed is gathered to be made
    orthogonal, by every rank for itself, and each takes its part of the result. Momentum stays distributed.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(named, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn=RATE)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step on all matrices that have a gradient."""
        parts = [p for group in self.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if not parts:
            return super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)
        return None

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[p], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = grad.lerp(average, momentum)
        assert isinstance(p, DTensor)
        assert isinstance(update, DTensor)
        step = _orthogonal(update.full_tensor(), group["lr"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(distribute_tensor(step, p.device_mesh, p.placements, src_data_rank=None))


def _orthogonal(update: Tensor, lr: float) -> Tensor:
    """The step that torch's Muon takes from zero along `update`."""
    step = nn.Parameter(torch.zeros_like(update))
    step.grad = update
    torch.optim.Muon([step], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=RATE).step()
    return step.detach()
