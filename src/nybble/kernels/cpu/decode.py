"""Codes to values: one row of stored codes at a time."""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import U64
from nybble.kernels.cpu.blocks import SINGLE, block_count
from nybble.kernels.cpu.jit import helper, kernel
from nybble.kernels.cpu.runs import copy_pair, scale_run


@helper
def decode_row(
    codes: Any,
    at: int,
    n: int,
    packed: bool,
    code_table: Any,
    pair_table: Any,
    scales: Any,
    scales_fp32: Any,
    scale_at: int,
    fp32: bool,
    scale_table: Any,
    shift: int,
    s_dec: Any,
    scale: Any,
    out: Any,
    to: int,
) -> None:
    """out[to + i] = (value of code i * scale of its block) * s_dec, for n codes from byte `at` on.

    Args:
        code_table: float32 [256], the value of each byte, of its low nibble if packed.
        pair_table: float32 [512], both values of each packed byte.
        scales, scales_fp32: block scales from `scale_at` on: bytes that scale_table float32 [256] gives
            values to, or the values themselves if `fp32`.
        shift: see `blocks.py`. The row starts on a block, and on a byte.
        scale: float32 scratch, one a block.
    """
    for b in range(block_count(n, shift)):
        scale[b] = scales_fp32[U64(scale_at + b)] if fp32 else scale_table[scales[U64(scale_at + b)]]
    if packed:
        half = n >> 1
        for i in range(half):
            copy_pair(pair_table, U64(codes[U64(at + i)]) << U64(1), out, U64(to + 2 * i))
        if n & 1:
            out[U64(to + n - 1)] = code_table[codes[U64(at + half)]]
    else:
        for i in range(n):
            out[U64(to + i)] = code_table[codes[U64(at + i)]]
    if shift == SINGLE:
        for i in range(n):
            e = U64(to + i)
            out[e] = (out[e] * scale[i]) * s_dec
        return
    runs = n >> 4
    for k in range(runs):
        e = U64(to + (k << 4))
        scale_run(out, e, scale[U64(k >> shift)], out, e)
        scale_run(out, e, s_dec, out, e)
    for j in range(runs << 4, n):
        e = U64(to + j)
        out[e] = (out[e] * scale[U64(j >> (shift + 4))]) * s_dec


@kernel
def dequantize_rows(
    first: int,
    last: int,
    columns: int,
    codes: Any,
    packed: bool,
    code_table: Any,
    pair_table: Any,
    scales: Any,
    scales_fp32: Any,
    fp32: bool,
    scale_table: Any,
    shift: int,
    block_rows: int,
    rows_per_lead: int,
    s_dec: Any,
    out: Any,
) -> None:
    """Rows first .. last - 1 of stored codes [R, bytes] to out float32 [R, columns]; s_dec float32 [R]."""
    blocks_per_lead = (rows_per_lead + block_rows - 1) // block_rows
    row_blocks = block_count(columns, shift)
    row_bytes = (columns + 1) >> 1 if packed else columns
    scale = np.empty(row_blocks, np.float32)
    for r in range(first, last):
        lead = r // rows_per_lead
        scale_row = lead * blocks_per_lead + (r - lead * rows_per_lead) // block_rows
        decode_row(
            codes, r * row_bytes, columns, packed, code_table, pair_table, scales, scales_fp32,
            scale_row * row_blocks, fp32, scale_table, shift, s_dec[r], scale, out, r * columns,
        )  # fmt: skip
