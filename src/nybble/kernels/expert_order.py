"""Pairs of tokens and experts sorted by expert: in plain torch, what a GPU's kernels do with a count, a sum
and a second look.

Legend: T tokens, k experts a token, E experts, R = T * k rows. A pair is token * k + choice.
"""

import torch
from torch import Tensor


def sort_pairs(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(int32 [R], pair at each row; int32 [count], where each expert's rows end), sorted stably.

    Args:
        experts: int64 [T, k]; pairs of an index of `count` or more, which is no expert here, go last.
    """
    ordered, order = torch.sort(experts.reshape(-1).clamp(0, count), stable=True)
    each = torch.arange(count, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(ordered, each, right=True)
    return order.to(torch.int32), ends.to(torch.int32)


def count_pairs(experts: Tensor, count: int) -> Tensor:
    """int64 [count]: the pairs of each expert, of the same `experts`."""
    flat = experts.reshape(-1).clamp(0, count)
    # Unlike bincount, this waits for no GPU.
    found = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return found.index_add_(0, flat, torch.ones_like(flat))[:count].clone()
