"""Quantise all weights of a model at once, ahead of the passes that use them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nybble.layers.experts import Experts, local, up_name
from nybble.layers.linear import Linear
from nybble.layers.operand import compute_dtype
from nybble.layers.step import StepState
from nybble.layers.weight_cache import WeightCache, tag_of
from nybble.layers.weights import Spec, Weight


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Compute the weight operands of all converted layers now, for all passes until the next step.

    Eager layers do this by themselves. A compiled forward pass cannot see whether a weight has changed:
    without this call it quantises the weights in every micro-batch. The caller vouches that no weight changes
    before `set_step` announces the next step, which withdraws the operands, and that weights are here outside
    of the passes: not sharded by FSDP. Experts that ranks share out may be.
    """
    for state, weight, spec, cache, before in _weights(model):
        if cache.mode == "none":
            continue
        cache.kept = {}
        planned = Weight(spec, cache, tag_of(weight, state.generation), before)
        _, key = state.keys(weight.device)
        gemms = spec.gemms
        grouped = ("rows", weight.shape[0]) if weight.dim() == 3 else (None, 0)
        planned.fprop(weight, key, compute_dtype(weight.device, gemms.fprop.x, gemms.fprop.w, *grouped))
        planned.dgrad(weight, key, compute_dtype(weight.device, gemms.dgrad.dy, gemms.dgrad.w, *grouped))
        state.managed = state.fresh = True


def _weights(model: nn.Module) -> Iterator[tuple[StepState, Tensor, Spec, WeightCache, int]]:
    """State, weight, spec and cache of each, and the matrices of the whole weight before this part of it."""
    for module in model.modules():
        if isinstance(module, Linear):
            yield module.step_state, module.weight, module.spec, module.weight_cache, 0
        elif isinstance(module, Experts):
            for name, spec, cache in zip(
                (up_name(module), "down_proj"), module.specs, module.weight_caches, strict=True
            ):
                yield module.step_state, local(getattr(module, name)), spec, cache, module.first_expert
