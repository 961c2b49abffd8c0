"""Shapes of tiles, sums over tokens in parts, and gradients of one tensor with several readers."""
# mypy: ignore-errors

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.kernels.cuda.jit import cdiv

WARP = 512
"""Elements of a tile for one warp: 16 a thread."""

PARTS = 1024
"""Most warps that share out a sum over tokens."""


def tile(columns: int, warps: int = 1) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile that spans rows of `columns` elements; `warps` at least.

    One warp a row where the row is short enough: its sums then wait for no other warp.
    """
    wide = triton.next_power_of_2(columns)
    warps = min(16, max(warps, wide // WARP))
    return max(1, warps * WARP // wide), wide, warps


def parts(rows: int, block: int, warps: int, most: int | None = None) -> tuple[int, int]:
    """(programs, tiles of `block` rows that each goes through); each leaves one partial sum."""
    tiles = cdiv(rows, block)
    each = max(1, cdiv(tiles * warps, most or PARTS))
    return cdiv(tiles, each), each


def dense(gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Those that there are, each in one piece."""
    return tuple(g.contiguous() for g in gradients if g is not None)


@triton.jit
def load_sum(pointers, at, mask):
    """Sum in FP32 of the elements `at` of several tensors; zeros of none."""
    total = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(len(pointers)):
        total += tl.load(pointers[i] + at, mask=mask, other=0.0).to(tl.float32)
    return total


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor of the shape of x, in one piece."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
