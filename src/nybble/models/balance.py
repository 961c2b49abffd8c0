"""Load balance of routed experts without an auxiliary loss (arXiv 2408.15664)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class ExpertLoad:
    """Mixin of models that route: counts tokens an expert, and moves the routers' selection bias.

    The model has `expert_load` [layers, E] int64, a buffer that is not saved; training steps add to it on
    the device.
    """

    expert_load: Tensor

    def routers(self) -> Iterator[nn.Module]:
        """Routers in layer order, each with `e_score_correction_bias` [E]."""
        raise NotImplementedError

    def expert_counts(self) -> Tensor:
        """Rows that each expert got in training since the last reset: [layers, E], a copy on the device."""
        return self.expert_load.clone()

    def reset_expert_counts(self) -> None:
        """Start counting from zero."""
        self.expert_load.zero_()

    @torch.no_grad()
    def update_router_bias(self, speed: float, counts: Tensor | None = None) -> None:
        """Raise by `speed` the bias of experts below their layer's mean load, lower it above; reset counts.

        Args:
            speed: step of the bias, for example 0.001.
            counts: [layers, E] summed over ranks, or None for this process's own.
        """
        load = (self.expert_load if counts is None else counts).float()
        move = speed * torch.sign(load.mean(-1, keepdim=True) - load)
        for router, step in zip(self.routers(), move, strict=True):
            bias = router.e_score_correction_bias
            assert isinstance(bias, Tensor)
            bias.add_(step.to(bias))
        self.reset_expert_counts()
