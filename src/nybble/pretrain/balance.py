"""How evenly a step's tokens fall on the experts, and the update of the routers' balancing bias."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from nybble import together
from nybble.models.balance import ExpertLoad


class LoadBalance:
    """The expert load of a model over one optimiser step; a model without routed experts has none."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        """`rate` is the step of the routers' selection bias; 0 leaves the bias alone."""
        self.rate = rate
        self.model = model if isinstance(model, ExpertLoad) else None

    def begin_step(self) -> None:
        if self.model is not None:
            self.model.reset_expert_counts()

    def end_step(self) -> list[list[int]]:
        """Moves the bias and returns the rows that each expert got in this step, [layers][E]."""
        if self.model is None:
            return []
        counts = self.model.expert_counts()
        if together.active():
            dist.all_reduce(counts)
        if self.rate > 0:
            self.model.update_router_bias(self.rate, counts)
        return counts.tolist()


def max_violation(counts: list[list[int]]) -> float:
    """Largest (rows of an expert / mean of its layer) - 1 over all layers; 0 is perfect balance."""
    if not counts:
        return 0.0
    load = torch.tensor(counts, dtype=torch.float64)
    return float((load.amax(-1) / load.mean(-1).clamp(min=1e-9)).max()) - 1.0
