"""Codes back to values, and the outer decode scale of each row."""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.e4m3 import e4m3_values
from nybble.kernels.cuda.gather import lanes
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4, nvfp4_values
from nybble.kernels.cuda.stores import store_values
from nybble.kernels.cuda.units import of_row


@triton.jit(do_not_specialize=["rows", "each", "cleared"])
def row_decode_scales(
    amax_ptr,
    group_ptr,
    out_ptr,
    zeros_ptr,  # int32, which the next kernel finds amaxes in
    rows,
    each,  # rows that share an amax
    cleared,  # of zeros
    OUTER_MAX: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    N: tl.constexpr,
):
    """S_dec of each row, of its group's amax or of that of `each` rows; and zeros."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    mask = row < rows
    which = row // each
    if HAS_GROUP:
        which = tl.load(group_ptr + row, mask=mask, other=0)
    s = rule.encode_scale(tl.load(amax_ptr + which, mask=mask, other=0.0), OUTER_MAX)
    tl.store(out_ptr + row, tl.div_rn(tl.full((N,), 1.0, tl.float32), s), mask=mask)
    if zeros_ptr is not None:
        tl.store(zeros_ptr + row, 0, mask=row < cleared)


@triton.jit
def eight_values(
    codes_ptr, at, scales_ptr, scale_at, mask, E2M1: tl.constexpr, SCALE: tl.constexpr, ASM: tl.constexpr
):
    """FP32 values, without the outer scale, of the eight codes number `at` behind codes_ptr (int32 words)."""
    if SCALE == rule.E4M3:
        factor = load_factor(scales_ptr, scale_at, mask, ASM)
        return nvfp4_values(load_nvfp4(codes_ptr, at, mask), factor, True, ASM)
    else:
        scale = tl.load(scales_ptr + scale_at, mask=mask, other=0)
        if SCALE != rule.FP32:
            scale = rule.e8m0_value(scale.to(tl.uint32))
        if E2M1:
            return nvfp4_values(load_nvfp4(codes_ptr, at, mask), scale, True, False)
        else:
            two = at[:, None] * 2 + tl.arange(0, 2)[None, :]
            low, high = tl.split(
                tl.load(codes_ptr + two, mask=mask[:, None], other=0).to(tl.uint32, bitcast=True)
            )
            q = e4m3_values(low, ASM) + e4m3_values(high, ASM)
            out = ()
            for j in tl.static_range(8):
                out = out + (q[j] * scale,)
            return out


@triton.jit(do_not_specialize=["rows", "words", "block_words", "scale_columns"])
def decode_rows(
    codes_ptr,  # int32 words
    scales_ptr,
    sdec_ptr,
    values_ptr,
    index_ptr,  # int32 [R]: row of the codes that each row of values is, if HAS_INDEX
    rows,  # R
    words,  # of eight elements, in a row
    block_words,  # of a block along the row
    scale_columns,
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SDEC: tl.constexpr,  # 0: none, 1: one, 2: one a row
    HAS_INDEX: tl.constexpr,
    OUT_BF16: tl.constexpr,
    BR: tl.constexpr,  # rows of a program, if it holds whole ones
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows of codes [R, 8 * words] to values."""
    PACKED: tl.constexpr = BR > 1
    if PACKED:
        to_row, w, mask = lanes(rows, words, 0, BR, N)
    else:
        tiles = tl.cdiv(words, N)
        to_row = (tl.program_id(0) // tiles).to(tl.int64)
        w = ((tl.program_id(0) % tiles) * N + tl.arange(0, N)).to(tl.int64)
        mask = w < words
    row = to_row
    if HAS_INDEX:
        row = of_row(index_ptr, to_row, mask, PACKED).to(tl.int64)
    at = (row // SCALE_ROWS) * scale_columns + w // block_words
    q = eight_values(codes_ptr, row * words + w, scales_ptr, at, mask, E2M1, SCALE, ASM)
    s_dec = 1.0
    if SDEC == 1:
        s_dec = tl.load(sdec_ptr)
    if SDEC == 2:
        s_dec = of_row(sdec_ptr, row, mask, PACKED)
    v = ()
    for j in tl.static_range(8):
        v = v + (q[j] * s_dec if SDEC > 0 else q[j],)
    store_values(values_ptr, (to_row * words + w) * 8, v, mask, OUT_BF16, ASM)


@triton.jit(do_not_specialize=["rows", "groups"])
def zero_tail(
    values_ptr, offs_ptr, rows, columns, groups, STEPS: tl.constexpr, BR: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Zero the rows at or beyond the last offset of values [T, C]; a program takes N columns of BR rows, then
    those behind all programs', STEPS times: as a rule there are none, and more programs would take longer."""
    end = tl.load(offs_ptr + groups - 1)
    c = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    for step in range(STEPS):
        first = end + (step * tl.num_programs(0) + tl.program_id(0)) * BR
        if first < rows:
            row = (first + tl.arange(0, BR)[:, None]).to(tl.int64)
            mask = (row < rows) & (c < columns)
            tl.store(values_ptr + (row * columns + c), tl.zeros((BR, N), tl.float32), mask=mask)
