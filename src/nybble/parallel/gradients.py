"""Gradients of several ranks: their norm, clipping by it, and their sum where every rank has all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MESSAGE = 1 << 25
"""Values of a message of gradients, unless one gradient has more."""


def add_over_ranks(gradients: Iterable[Tensor]) -> None:
    """Replaces each gradient by the sum over all ranks, in few messages and FP32; every rank has
    gradients of the same tensors."""
    batch: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if batch and size + gradient.numel() > MESSAGE:
            _add(batch)
            batch, size = [], 0
        batch.append(gradient)
        size += gradient.numel()
    _add(batch)


def _add(batch: list[Tensor]) -> None:
    whole = torch.cat([gradient.reshape(-1).float() for gradient in batch])
    dist.all_reduce(whole)
    sums = [part.view_as(g) for part, g in zip(whole.split([g.numel() for g in batch]), batch, strict=True)]
    torch._foreach_copy_(batch, sums)


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
