"""Quantise with square blocks, 16x16 (NVFP4) or 128x128 (FP8), along the last axis."""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import load_key
from nybble.kernels.cuda.finish_rows import finish_units
from nybble.kernels.cuda.registers import load_raw, magnitude, magnitude_bits, max_magnitudes
from nybble.kernels.cuda.rows import OUTER_NONE


@triton.jit(do_not_specialize=["count", "units", "tag"])
def quantize_squares(
    x_ptr,
    codes_ptr,
    scales_ptr,
    values_ptr,
    amax_ptr,
    key_ptr,
    rows_ptr,
    row_stride,
    lead_stride,
    count,  # rows of a matrix
    columns,
    value_stride,
    units,
    tag,
    AMAX_STRIDE: tl.constexpr,  # 1 where each leading index has an amax of its own
    E2M1: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    OUTER: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VALUES: tl.constexpr,
    IN_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SQUARE: tl.constexpr,  # rows of a block
    BLOCK_UNITS: tl.constexpr,  # units of a block along the row
    ACROSS: tl.constexpr,  # blocks of a tile
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """One row of blocks of x [lead, count, C], ACROSS blocks a tile. `count` is whole blocks if lead > 1."""
    WIDE: tl.constexpr = ACROSS * BLOCK_UNITS
    N: tl.constexpr = SQUARE * WIDE
    lead = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, N)
    r = (tl.program_id(1) * SQUARE + n // WIDE).to(tl.int64)
    u = (tl.program_id(0) * WIDE + n % WIDE).to(tl.int64)
    mask = (r < count) & (u < units)
    start = lead * lead_stride + r * row_stride
    raws = (load_raw(x_ptr, start + u * (8 * CHUNKS), mask, IN_BF16),)
    m = magnitude(raws[0], IN_BF16, ASM)
    for c in tl.static_range(1, CHUNKS):
        raws = raws + (load_raw(x_ptr, start + u * (8 * CHUNKS) + 8 * c, mask, IN_BF16),)
        m = max_magnitudes(m, magnitude(raws[c], IN_BF16, ASM), IN_BF16, ASM)
    m = magnitude_bits(m, IN_BF16).to(tl.int32)
    m = tl.max(tl.max(tl.reshape(m, (SQUARE, ACROSS, BLOCK_UNITS)), axis=2), axis=0)
    m = tl.reshape(tl.broadcast_to(m[None, :, None], (SQUARE, ACROSS, BLOCK_UNITS)), (N,)).to(tl.uint32)
    outer_amax = 0.0
    s_enc = 1.0
    s_dec = 1.0
    if OUTER != OUTER_NONE:
        outer_amax = tl.load(amax_ptr + lead * AMAX_STRIDE)
        s_enc = rule.encode_scale(outer_amax, OUTER_MAX)
        s_dec = tl.div_rn(1.0, s_enc)
    key = (0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
    row = lead * count + r
    e_row = row
    if HAS_ROWS:
        e_row = tl.load(rows_ptr + row, mask=mask, other=0)
    finish_units(
        raws,
        m,
        u,
        mask,
        0,
        row,
        e_row,
        False,
        outer_amax,
        s_enc,
        s_dec,
        codes_ptr,
        scales_ptr,
        values_ptr,
        None,
        key,
        columns,
        value_stride,
        units,
        0,
        units,
        tag,
        E2M1,
        ELEMENT_MAX,
        SCALE,
        BLOCK_UNITS,
        OUTER_MAX,
        False,
        STOCHASTIC,
        not VALUES,
        VALUES,
        0,
        IN_BF16,
        OUT_BF16,
        ALIGNED,
        SQUARE,
        False,
        N,
        CHUNKS,
        ASM,
    )
