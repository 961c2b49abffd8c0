"""MXFP8 values along the features and along the tokens from one read: the two forms of an output gradient."""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.columns import over_lanes, to_lanes
from nybble.kernels.cuda.draws import load_key
from nybble.kernels.cuda.e4m3 import e4m3_values
from nybble.kernels.cuda.finish_columns import column_words, draws_at, store_tokens
from nybble.kernels.cuda.finish_rows import e4m3_words
from nybble.kernels.cuda.registers import advance, load_raw, magnitude, magnitude_bits, times
from nybble.kernels.cuda.sources import block_bounds, tile_maxima
from nybble.kernels.cuda.stores import store_values


@triton.jit
def along_features(
    raw, words, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):
    """Eight FP32: eight features of a token rounded in their block, which four neighbouring threads hold."""
    N: tl.constexpr = raw[0].shape[0]
    m = magnitude_bits(magnitude(raw, BF16, ASM), BF16)
    m = tl.max(tl.reshape(m.to(tl.int32), (N // 4, 4)), axis=1)
    m = tl.reshape(tl.broadcast_to(m[:, None], (N // 4, 4)), (N,)).to(tl.uint32)
    byte = rule.e8m0_byte(m, 448.0, SCALE)
    scale = rule.e8m0_value(byte)
    w0, w1 = e4m3_words(raw, rule.e8m0_multiplier(byte), words, STOCHASTIC, SCALE, BF16, ASM)
    q = e4m3_values(w0, ASM) + e4m3_values(w1, ASM)
    v = ()
    for j in tl.static_range(8):
        v = v + (q[j] * scale,)
    return v


@triton.jit(do_not_specialize=["tokens", "blocks", "tag_rows", "tag_columns"])
def fake_quantize_both(
    x_ptr,
    along_rows_ptr,  # values whose blocks run along the features
    along_columns_ptr,  # values whose blocks run along the tokens
    key_ptr,
    rows_ptr,
    start_ptr,
    count_ptr,
    index_ptr,  # int32 [T]: row of x that each row is, if HAS_INDEX
    factor_ptr,  # FP32 [T]: what the form along the tokens is multiplied by first, if HAS_FACTOR
    row_stride,
    columns,
    tokens,
    blocks,
    tag_rows,
    tag_columns,
    SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SOURCE: tl.constexpr,
    OUT_BF16: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    GROUPED: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """x [T, C], C a multiple of 8; a warp takes 32 tokens x 64 features, as in `columns.py`."""
    BF16: tl.constexpr = SOURCE == 0
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * 8 + n % 8) * 8
    block = tl.program_id(1) * W + n // 32
    first = (n // 8) % 4 * 8
    has_block = block < blocks
    start, count = block_bounds(start_ptr, count_ptr, block, has_block, tokens, 32, GROUPED)
    inside = has_block & (column < columns)
    row = (start + first).to(tl.int64)
    column = column.to(tl.int64)

    raws = ()
    zeros = ()
    for i in tl.static_range(8):
        mask = inside & (first + i < count)
        if HAS_INDEX:
            at = tl.load(index_ptr + (row + i), mask=mask, other=0).to(tl.int64)
            raw = load_raw(x_ptr, at * row_stride + column, mask, BF16)
        else:
            raw = load_raw(advance(x_ptr, row * row_stride + column, BF16), i * row_stride, mask, BF16)
        raws = raws + (raw,)
        zeros = zeros + (0.0,)

    places = ()
    key = (0, 0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
    for i in tl.static_range(8):
        mask = inside & (first + i < count)
        if STOCHASTIC:
            e_row = row
            further = columns.to(tl.int64) * i
            if HAS_ROWS:
                e_row = tl.load(rows_ptr + (row + i), mask=mask, other=0)
                further = 0
            places = places + ((e_row * columns + column, further),)
            words = draws_at(places[i], key, tag_rows.to(tl.uint32), True)
        else:
            words = (0, 0, 0, 0)
        v = along_features(raws[i], words, SCALE, STOCHASTIC, BF16, ASM)
        to_ptr = advance(along_rows_ptr, row * columns + column, OUT_BF16)
        store_values(to_ptr, columns * i, v, mask, OUT_BF16, ASM)

    if HAS_FACTOR:
        scaled = ()
        for i in tl.static_range(8):
            factor = tl.load(factor_ptr + row + i, mask=inside & (first + i < count), other=0.0)
            scaled = scaled + (times(raws[i], factor, BF16, ASM),)
        raws = scaled
    maxima = tile_maxima(raws, zeros, zeros, SOURCE, STOCHASTIC, ASM)
    muls = ()
    scales = ()
    for j in tl.static_range(8):
        byte = rule.e8m0_byte(over_lanes(maxima[j], W, 4, 8), 448.0, SCALE)
        muls = muls + (to_lanes(rule.e8m0_multiplier(byte), W, 4, 8),)
        scales = scales + (to_lanes(rule.e8m0_value(byte), W, 4, 8),)
    for h in tl.static_range(2):
        words = column_words(
            raws, zeros, zeros, places, key, tag_columns.to(tl.uint32), muls, h,
            SCALE, STOCHASTIC, True, SOURCE, ASM,
        )  # fmt: skip
        store_tokens(
            along_columns_ptr, words, scales, row, first, count, column, inside, columns, h, OUT_BF16, ASM
        )
