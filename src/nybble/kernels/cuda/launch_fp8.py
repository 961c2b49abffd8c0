"""Launches of `fp8_rows.py` and `fp8_groups.py`: grids, and descriptors of what the TMA engine moves."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nybble.kernels.cuda import fp8_groups, fp8_rows
from nybble.kernels.cuda import fp8_sums as sums
from nybble.kernels.cuda.jit import cdiv, multiprocessors
from nybble.kernels.cuda.launch_rows import pow2

STAGES = 4
WARPS = 4
REGISTERS = 168
"""A thread's at the launch of 12 warps; they hand them to one another."""
SORT_LIMIT = 64
"""Groups up to which each program sorts them by length; more are even enough as they come."""
BM, BN, BK = sums.BM.value, sums.BN.value, sums.BK.value


def product_of_rows(
    codes: Tensor,
    scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    offs: Tensor,
    index: Tensor | None = None,
) -> Tensor:
    """Each group's rows of E4M3 [R, C], which end at offs (int32 [E]), times its matrix of E4M3 [E, N, C].

    C and N are multiples of 16. With `index` (int32 [R]) row r is row index[r] of the codes and scales.
    Returns BF16 [R, N]; rows at or beyond offs[-1] hold anything.
    """
    E, N, C = w_codes.shape
    R = codes.shape[0] if index is None else index.shape[0]
    out = torch.empty(R, N, dtype=torch.bfloat16, device=codes.device)
    if not out.numel() or not E:
        return out
    codes, w = codes.contiguous(), w_codes.contiguous().view(E * N, C)
    tiles = (R // BM + E) * cdiv(N, 2 * BN)
    fp8_rows.product_of_rows[(min(multiprocessors(out.device), tiles),)](
        plain(codes, BM, BK) if index is None else None,
        codes,
        scales.contiguous(),
        index,
        plain(w, 2 * BN, BK),
        w_scales.contiguous(),
        offs,
        ending_rows(out),
        N,
        C,
        E,
        tiles,
        HAS_INDEX=index is not None,
        STAGES=STAGES,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )
    return out


def product_of_groups(
    a_codes: Tensor,
    a_scales: Tensor | None,
    b_codes: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """E4M3 [N, P] times E4M3 [K, P] transposed over each group of P alone: [G, N, K] in `dtype`.

    Groups end at `ends` (int32 [G]), multiples of 32; scales are [G, N], or None for ones, and [G, K]. N, K
    and P are multiples of 16.
    """
    N, K, G = a_codes.shape[0], b_codes.shape[0], ends.shape[0]
    out = torch.empty(G, N, K, dtype=dtype, device=a_codes.device)
    if not out.numel():
        return out
    tiles = G * cdiv(N, BM) * cdiv(K, 2 * BN)
    fp8_groups.product_of_groups[(min(multiprocessors(out.device), tiles),)](
        _ending_columns(a_codes, BM),
        None if a_scales is None else a_scales.contiguous(),
        _ending_columns(b_codes, 2 * BN),
        b_scales.contiguous(),
        ends,
        torch.empty_like(ends),
        out,
        N,
        K,
        G,
        tiles,
        G=pow2(G),
        A_SCALED=a_scales is not None,
        SORTED=G <= SORT_LIMIT,
        STAGES=STAGES,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )
    return out


# The engine knows one bound an axis. So that tiles end where a group does, the axis is declared with HUGE
# elements, coordinates count back from there, and two more axes bring the address to the end of the group:
# a certain step of the first one is -HUGE elements modulo 2^64, steps of the second one lead there.
HUGE, WRAP = sums.HUGE.value, sums.WRAP.value


def plain(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of E4M3 or BF16 [R, C]."""
    layout = gl.NVMMASharedLayout(128, 8 * t.element_size(), 2)
    return TensorDescriptor(t, list(t.shape), [t.shape[1], 1], [rows, columns], layout)


def _ending_columns(t: Tensor, rows: int) -> TensorDescriptor:
    """Tiles [rows, BK] of [N, P] that end at column `end`: at (WRAP, end / 32, row, HUGE - end + column)."""
    layout = gl.NVMMASharedLayout(128, 8, 4)
    shape, strides = [WRAP + 1, WRAP, t.shape[0], HUGE], [(1 << 38) - 16, 32, t.stride(0), 1]
    return TensorDescriptor(t, shape, strides, [1, 1, rows, BK], layout)


def ending_rows(t: Tensor) -> TensorDescriptor:
    """Tiles [64, BN] of BF16 [R, N] that end at row `end`: at (HUGE, end, HUGE - end + row, column)."""
    layout = gl.NVMMASharedLayout(128, 16, 4)
    step = t.shape[1]
    shape, strides = [HUGE + 1, HUGE, HUGE, step], [(1 << 34) - step, step, step, 1]
    return TensorDescriptor(t, shape, strides, [1, 1, sums.HALF.value, BN], layout)
