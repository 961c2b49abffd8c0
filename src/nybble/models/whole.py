"""When a layer may be computed as a whole, by hand, and not module by module."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nybble.kernels.direct import by_hand
from nybble.layers.linear import Linear as Converted
from nybble.models.linear import Linear


def unwatched(layer: nn.Module, x: Tensor) -> bool:
    """Whether nobody could tell: eager FP32 on a CPU, and no hook or mode that expects modules and operators
    one by one."""
    return by_hand(x) and x.numel() > 0 and not _hooked(layer)


def _hooked(layer: nn.Module) -> bool:
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in layer.modules()
        if module is not layer
    )


def common_precision(layers: Iterable[nn.Module]) -> str | None:
    """To what all of the linear layers round all their operands, "fp32" or "bf16"; None if they differ, or do
    anything else."""
    found = {_precision(layer) for layer in layers}
    return found.pop() if len(found) == 1 else None


def _precision(layer: nn.Module) -> str | None:
    weight = getattr(layer, "weight", None)
    if weight is None or weight.dtype != torch.float32 or getattr(layer, "bias", None) is not None:
        return None
    if isinstance(layer, Converted):
        return "bf16" if layer.rounds_to_bf16() else None
    return "fp32" if type(layer) is Linear else None
