"""The norm of gradients that lie on several arrangements of ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that one operation may take together: all on one mesh, or on none."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm of all gradients of all ranks, FP32, []."""
    norms = [nn.utils.get_total_norm(group) for group in by_mesh(gradients)]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scales gradients down to a norm of `limit` where `norm` exceeds it."""
    for group in by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, limit, norm)
