"""The last step of a sum over tokens: programs leave partial sums, one kernel adds those in a fixed order."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 512, 16, 8
"""Of a tile: few columns a program, so that many programs read short sums of many parts."""


@triton.jit(do_not_specialize=["P"])
def add_parts(
    part_ptr, out_ptr, P, N: tl.constexpr, LOOPS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part_ptr += tl.program_id(1).to(tl.int64) * P * N
    total = tl.zeros((BP, BN), tl.float32)
    for loop in range(LOOPS):
        p = loop * BP + tl.arange(0, BP)
        at = p.to(tl.int64)[:, None] * N + n[None, :]
        total += tl.load(part_ptr + at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    out = tl.program_id(1) * N + n
    tl.store(out_ptr + out, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=n < N)


def add(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """FP32 [sums, parts, ...] in one piece -> [sums, ...] in `dtype`."""
    count, P, *shape = parts.shape
    out = torch.empty(count, *shape, dtype=dtype, device=parts.device)
    N = out[0].numel()
    BP = min(ROWS, triton.next_power_of_2(max(P, 1)))
    if N:
        add_parts[(triton.cdiv(N, COLUMNS), count)](
            parts, out, P, N, triton.cdiv(P, BP), BP, COLUMNS, num_warps=WARPS, enable_fp_fusion=True
        )
    return out
