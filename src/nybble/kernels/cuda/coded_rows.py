"""Few rows an expert times matrices that are kept as NVFP4 codes: decoding reads weights at 4.5 bits a value.

A pass over dequantised weights writes and reads 16 bits for each value; with few rows that, and the launches,
take longer than the product. Here a tile of codes is decoded in registers, exactly in BF16, and multiplied.
Legend: R rows sorted by expert, K inputs, N outputs, E experts; byte h has elements 2h (low) and 2h + 1.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.jit import INTERPRETED, cdiv, use_asm
from nybble.kernels.cuda.nvfp4 import load_e4m3

BLOCK_M, BLOCK_N, BLOCK_BYTES = 16, 64, 32


@triton.jit
def _e2m1(code):
    """FP32 values of codes in the low four bits of uint32: an index at bit 22 is a float 2^-126 too small."""
    return value(((code & 7) << 22) | ((code & 8) << 28)) * 2.0**126


@triton.jit
def multiply_codes(
    x_ptr,  # BF16 [R, K]
    codes_ptr,  # uint8 [E, N, K / 2]
    scales_ptr,  # E4M3 [E, N, K / 16]
    ends_ptr,  # int32 [E]
    out_ptr,  # BF16 [R, N]
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    BM: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,  # of the tiles: BF16, or FP32 for the interpreter, which cannot multiply BF16
):
    """Tile number program_id(0) among those of all experts; an expert's tiles begin with its first row."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + tl.minimum(e, E - 1))
    starts = tl.where(e < E, tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0), ends)
    tiles = (ends - starts + BM - 1) // BM
    up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((up_to <= tile).to(tl.int32), 0)
    if expert < E:
        mine = e == expert
        first = tl.sum(tl.where(mine, starts + (tile - (up_to - tiles)) * BM, 0), 0)
        last = tl.sum(tl.where(mine, ends, 0), 0)
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        wide = expert.to(tl.int64) * N + columns
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K // 2, BH):
            k = start * 2 + tl.arange(0, 2 * BH)
            x = tl.load(
                x_ptr + rows[:, None] * K + k[None, :],
                mask=(rows < last)[:, None] & (k < K)[None, :],
                other=0.0,
            )
            even, odd = tl.split(tl.reshape(x.to(DTYPE), (BM, BH, 2)))
            h = start + tl.arange(0, BH)
            mask = (columns < N)[:, None] & (h < K // 2)[None, :]
            code = tl.load(codes_ptr + wide[:, None] * (K // 2) + h[None, :], mask=mask, other=0).to(
                tl.uint32
            )
            scale = load_e4m3(scales_ptr, wide[:, None] * (K // 16) + (h // 8)[None, :], mask, ASM)
            low, high = (_e2m1(code) * scale).to(DTYPE), (_e2m1(code >> 4) * scale).to(DTYPE)
            acc = tl.dot(even, tl.trans(low), acc, input_precision="ieee")
            acc = tl.dot(odd, tl.trans(high), acc, input_precision="ieee")
        mask = (rows < last)[:, None] & (columns < N)[None, :]
        tl.store(out_ptr + rows[:, None] * N + columns[None, :], acc.to(tl.bfloat16), mask=mask)


def rows_times_codes(x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """x [R, K] times the transposed matrix of each row's expert, without its outer scale, added up in FP32.

    Args:
        x: BF16, K a multiple of 16.
        codes: uint8 [E, N, K / 2], E2M1.
        scales: E4M3 bytes [E, N, K / 16].
        ends: int32 [E], where the rows of each expert end.
    Returns:
        BF16 [R, N]; rows at or beyond the last end hold anything.
    """
    x, (R, K), (E, N, _) = x.contiguous(), x.shape, codes.shape
    out = torch.empty(R, N, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        grid = (cdiv(R, BLOCK_M) + E, cdiv(N, BLOCK_N))
        multiply_codes[grid](
            x, codes.contiguous(), scales.contiguous().view(torch.uint8), ends, out, N,
            K=K, E=E, EXPERTS=triton.next_power_of_2(E), BM=BLOCK_M, BN=BLOCK_N, BH=BLOCK_BYTES,
            ASM=use_asm(x.device), DTYPE=tl.float32 if INTERPRETED else tl.bfloat16, enable_fp_fusion=True,
        )  # fmt: skip
    return out
