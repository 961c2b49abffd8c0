"""The few collectives that a run under torchrun needs; with one process they do nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def total(value: float) -> float:
    """Sum over all ranks."""
    if world() == 1:
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return float(tensor)


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order, on every rank."""
    if world() == 1:
        return [value]
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, value)
    return out


def reduce_gradients(model: nn.Module) -> None:
    """Adds the gradients of all ranks; a parameter without one on this rank counts as zeros."""
    if world() == 1:
        return
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
