"""Launches of `order.py`."""

import torch
from torch import Tensor

from nybble.kernels.cuda import order as kernel
from nybble.kernels.cuda.jit import cdiv
from nybble.kernels.cuda.launch_rows import pow2

SORTED, COUNTED = 128, 1024
"""Pairs of a program."""
MOST = 2046
"""Experts that one program counts."""


def fits(experts: Tensor, count: int) -> bool:
    """Whether the kernels serve."""
    pairs = experts.numel()
    counts = (count + 1) * cdiv(pairs, SORTED)  # that a sort adds up, told apart in 32 bits
    return experts.dtype == torch.int64 and 0 < pairs < 1 << 30 and 0 < count <= MOST and counts < 1 << 31


def sort_pairs(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `fused.sort_pairs`."""
    flat = experts.reshape(-1).contiguous()
    pairs, C = flat.numel(), pow2(count + 2)
    blocks = cdiv(pairs, SORTED)
    counts = torch.empty((count + 1) * blocks, dtype=torch.int32, device=flat.device)
    order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    ends = torch.empty(count, dtype=torch.int32, device=flat.device)
    kernel.count_blocks[(blocks,)](flat, counts, pairs, count, blocks, N=SORTED, C=C, enable_fp_fusion=True)
    sums = torch.cumsum(counts, 0, dtype=torch.int32)
    kernel.place_pairs[(blocks,)](
        flat, sums, order, ends, pairs, count, blocks, N=SORTED, C=C, enable_fp_fusion=True
    )
    return order, ends


def count_pairs(experts: Tensor, count: int) -> Tensor:
    """See `fused.count_pairs`."""
    flat = experts.reshape(-1).contiguous()
    counts = torch.zeros(count, dtype=torch.int64, device=flat.device)
    programs = cdiv(flat.numel(), COUNTED)
    kernel.add_counts[(programs,)](
        flat, counts, flat.numel(), count, N=COUNTED, C=pow2(count + 2), enable_fp_fusion=True
    )
    return counts
