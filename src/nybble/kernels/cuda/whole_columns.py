"""Whole columns in FP8: scales of known amaxes, and matrices of which a program reads its columns twice.

A thread owns 8 tokens x 8 features, a warp 32 x 64 at a time, as in `columns.py`.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import load_key
from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.finish_columns import finish_e4m3
from nybble.kernels.cuda.registers import join8, umax
from nybble.kernels.cuda.sources import block_bounds, load_sources, tile_maxima


@triton.jit
def store_whole_scales(
    scales_ptr,
    amax_ptr,
    group_ptr,
    lead,
    columns,
    blocks,
    GROUPED: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """The scales of C whole columns, from bits of their amaxes, if one of the W blocks is their first."""
    first = tl.program_id(1) * W
    begins = first == 0
    if GROUPED:
        before = tl.load(group_ptr + tl.maximum(first - 1, 0))
        begins |= before != tl.load(group_ptr + tl.minimum(first + W, blocks) - 1)
    if begins:
        c = (tl.program_id(0) * C + tl.arange(0, C))[None, :]
        b = (first + tl.arange(0, W))[:, None]
        ok = (c < columns) & (b < blocks)
        matrix = lead + b * 0
        if GROUPED:
            matrix = lead * 0 + tl.load(group_ptr + b, mask=b < blocks, other=0)
        m = tl.load(amax_ptr + matrix * columns + c, mask=ok, other=0).to(tl.uint32, bitcast=True)
        scale = rule.reciprocal(rule.fp32_multiplier(value(m)), ASM)
        scale = tl.where(m >= rule.INFINITE, float("nan"), scale)
        tl.store(scales_ptr + matrix * columns + c, scale, mask=ok)


@triton.jit
def to_all_lanes(t, L: tl.constexpr):
    """[8] to each of L lanes of eight."""
    return tl.reshape(tl.broadcast_to(t[None, :], (L, 8)), (8 * L,))


@triton.jit(do_not_specialize=["draw_columns", "tokens", "blocks", "tag"])
def quantize_whole_columns(
    x_ptr,
    source_codes_ptr,
    source_scales_ptr,
    sdec_ptr,
    codes_ptr,  # int32 words [lead, C, padded T]
    scales_ptr,  # FP32 [lead, C]
    key_ptr,
    rows_ptr,
    row_stride,
    lead_stride,
    columns,  # of x and of the outputs, a multiple of 8
    draw_columns,  # of the logical tensor
    tokens,
    blocks,
    tag,
    STOCHASTIC: tl.constexpr,
    SOURCE: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """64 columns of one matrix of x [lead, T, C]."""
    lead = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * 8 + n % 8) * 8
    first = (n // 8) % 4 * 8
    is_column = column < columns
    column = column.to(tl.int64)
    most = ()
    for _ in tl.static_range(8):
        most = most + (tl.zeros((32 * W,), tl.uint32),)
    tiles = blocks * 0
    while tiles * W < blocks:
        block = tiles * W + n // 32
        start, count = block_bounds(None, None, block, is_column, tokens, 32, False)
        raws, sfs, sdecs = load_sources(
            x_ptr, source_codes_ptr, source_scales_ptr, sdec_ptr, None, None,
            lead * lead_stride + (start + first).to(tl.int64) * row_stride + column, row_stride,
            (lead * tokens + start + first).to(tl.int64), columns, column, is_column & (block < blocks),
            first, count, SOURCE, SDEC_ROWS, SCALE_ROWS, False, False, ASM,
        )  # fmt: skip
        maxima = tile_maxima(raws, sfs, sdecs, SOURCE, STOCHASTIC, ASM)
        more = ()
        for j in tl.static_range(8):
            more = more + (umax(most[j], maxima[j]),)
        most = more
        tiles += 1

    muls = ()
    bads = ()
    stored = ()
    for j in tl.static_range(8):
        m = tl.max(tl.reshape(most[j].to(tl.int32), (4 * W, 8)), axis=0).to(tl.uint32)
        bad = m >= rule.INFINITE
        mul = rule.fp32_multiplier(value(m))
        stored = stored + (tl.where(bad, float("nan"), rule.reciprocal(mul, ASM)),)
        muls = muls + (to_all_lanes(mul, 4 * W),)
        bads = bads + (to_all_lanes(bad.to(tl.int32), 4 * W) != 0,)
    c = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(scales_ptr + lead * columns + c, tl.reshape(join8(stored), (64,)), mask=c < columns)

    key = (0, 0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
    tiles = blocks * 0
    while tiles * W < blocks:
        block = tiles * W + n // 32
        start, count = block_bounds(None, None, block, is_column, tokens, 32, False)
        inside = is_column & (block < blocks)
        row = (lead * tokens + start + first).to(tl.int64)
        raws, sfs, sdecs = load_sources(
            x_ptr, source_codes_ptr, source_scales_ptr, sdec_ptr, None, None,
            lead * lead_stride + (start + first).to(tl.int64) * row_stride + column, row_stride,
            row, columns, column, inside, first, count, SOURCE, SDEC_ROWS, SCALE_ROWS, False, False, ASM,
        )  # fmt: skip
        places = ()  # of the draws of each token
        if STOCHASTIC:
            for i in tl.static_range(8):
                e_row = row
                further = draw_columns.to(tl.int64) * i
                if HAS_ROWS:
                    e_row = tl.load(rows_ptr + (row + i), mask=inside & (first + i < count), other=0)
                    further = 0
                places = places + ((e_row * draw_columns + column, further),)
        finish_e4m3(
            raws, sfs, sdecs, places, key, tag.to(tl.uint32), muls, bads, muls, row, first, count, column,
            inside, lead, tiles, columns, blocks, codes_ptr, None, rule.FP32, 32, STOCHASTIC, ALIGNED,
            False, SOURCE, False, W, ASM,
        )  # fmt: skip
        tiles += 1
