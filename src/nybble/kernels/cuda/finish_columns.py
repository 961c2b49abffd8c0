"""The last part of quantising along the tokens: rounding, codes and values of a tile whose scales are known.

A thread owns 8 tokens x 8 features; codes leave through a transposition of 32-bit words.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import draw_words
from nybble.kernels.cuda.e2m1 import e2m1_index, e2m1_magnitude, e2m1_rounded
from nybble.kernels.cuda.e4m3 import e4m3_rounded, e4m3_values, e4m3_word_nearest, e4m3_word_stochastic
from nybble.kernels.cuda.elements import bits, scaled_magnitude, with_sign
from nybble.kernels.cuda.registers import advance, join8
from nybble.kernels.cuda.sources import column_signs, source_floats, source_magnitudes
from nybble.kernels.cuda.stores import store_values


@triton.jit
def finish_e4m3(
    raws,
    sfs,
    sdecs,
    places,
    key,
    tag,
    muls,
    bads,
    scales,
    row,
    first,
    count,
    column,
    inside,
    lead,
    tiles,
    columns,
    blocks,
    codes_ptr,
    values_ptr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    VALUES: tl.constexpr,
    SOURCE: tl.constexpr,
    OUT_BF16: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """Round to E4M3 and store; they are the W tiles number `tiles` of their columns."""
    LANES: tl.constexpr = BLOCK // 8
    K: tl.constexpr = 32 // LANES
    halves = ()
    for h in tl.static_range(2):
        words = column_words(
            raws, sfs, sdecs, places, key, tag, muls, h, SCALE, STOCHASTIC, ALIGNED, SOURCE, ASM
        )
        if VALUES:
            store_tokens(
                values_ptr, words, scales, row, first, count, column, inside, columns, h, OUT_BF16, ASM
            )
        else:
            halves = halves + words_or_nan(words, bads, first, count, h)
    if not VALUES:
        pairs = ()
        for j in tl.static_range(8):
            pairs = pairs + (tl.join(halves[j], halves[8 + j]),)
        t = tl.reshape(join8(pairs), (W, LANES, K, 2, 8))
        t = tl.reshape(tl.permute(t, (2, 4, 0, 1, 3)), (K * 8, W * LANES * 2))
        store_transposed(codes_ptr, t, lead, tiles, columns, blocks * (BLOCK // 4), K * 8, W * LANES * 2)


@triton.jit
def words_or_nan(words, bads, first, count, h: tl.constexpr):
    """Eight of `column_words`, those of bad blocks NaN; padding of a group has code 0 in any block."""
    nan = first * 0
    for i in tl.static_range(4):
        nan = nan | tl.where(first + (4 * h + i) < count, 0x7F << (8 * i), 0)
    out = ()
    for j in tl.static_range(8):
        out = out + (tl.where(bads[j], nan, words[j]).to(tl.uint32),)
    return out


@triton.jit
def store_tokens(
    values_ptr,
    words,
    scales,
    row,
    first,
    count,
    column,
    inside,
    columns,
    h: tl.constexpr,
    OUT_BF16: tl.constexpr,
    ASM: tl.constexpr,
):
    """The values of tokens 4h .. 4h + 3 from the words that `column_words` gave of them."""
    quads = ()
    for j in tl.static_range(8):
        quads = quads + (e4m3_values(words[j], ASM),)
    values_ptr = advance(values_ptr, row * columns + column, OUT_BF16)
    for i in tl.static_range(4):
        v = ()
        for j in tl.static_range(8):
            v = v + (quads[j][i] * scales[j],)
        mask = inside & (first + (4 * h + i) < count)
        store_values(values_ptr, columns * (4 * h + i), v, mask, OUT_BF16, ASM)


@triton.jit
def draws_at(place, key, tag, ALIGNED: tl.constexpr):
    """The draws of eight features at one of `places`."""
    return draw_words(place[0], place[1], key, tag, ALIGNED)


@triton.jit
def column_words(
    raws,
    sfs,
    sdecs,
    places,
    key,
    tag,
    muls,
    h: tl.constexpr,
    SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    SOURCE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Eight words, one a feature, of the E4M3 bytes of tokens 4h .. 4h + 3.

    `places` says for each token where draws are counted from, as `draw_words` takes it.
    """
    out = ()
    if STOCHASTIC:
        CLAMP: tl.constexpr = SCALE != rule.E8M0_UP
        s = ()
        for i in tl.static_range(4):
            x = source_magnitudes(raws[4 * h + i], sfs[4 * h + i], sdecs[4 * h + i], SOURCE, ASM)
            draws = draws_at(places[4 * h + i], key, tag, ALIGNED)
            mine = ()
            for j in tl.static_range(8):
                mine = mine + (e4m3_rounded(scaled_magnitude(x[j], muls[j], ASM), draws, j, ASM, CLAMP),)
            s = s + (mine,)
        signs = column_signs(raws, 4 * h, SOURCE, ASM)
        for j in tl.static_range(8):
            out = out + (e4m3_word_stochastic(s[0][j], s[1][j], s[2][j], s[3][j], signs[j], ASM),)
    else:
        x = ()
        for i in tl.static_range(4):
            x = x + (source_floats(raws[4 * h + i], sfs[4 * h + i], sdecs[4 * h + i], SOURCE, ASM),)
        for j in tl.static_range(8):
            m = muls[j]
            out = out + (e4m3_word_nearest(x[0][j] * m, x[1][j] * m, x[2][j] * m, x[3][j] * m, ASM),)
    return out


@triton.jit
def finish_e2m1(
    raws,
    sfs,
    sdecs,
    places,
    key,
    tag,
    muls,
    bads,
    scales,
    row,
    first,
    count,
    column,
    inside,
    lead,
    tiles,
    columns,
    blocks,
    codes_ptr,
    values_ptr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    VALUES: tl.constexpr,
    SOURCE: tl.constexpr,
    OUT_BF16: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """Round to E2M1 and store, likewise."""
    LANES: tl.constexpr = BLOCK // 8
    K: tl.constexpr = 32 // LANES
    words = ()
    for i in tl.static_range(8):
        x = source_floats(raws[i], sfs[i], sdecs[i], SOURCE, ASM)
        draws = (0, 0, 0, 0)
        if STOCHASTIC:
            draws = draws_at(places[i], key, tag, ALIGNED)
        v = ()
        grown = ()
        for j in tl.static_range(8):
            t = e2m1_rounded(scaled_magnitude(x[j], muls[j], ASM), draws, j, STOCHASTIC, ASM)
            if VALUES:
                v = v + (with_sign(e2m1_magnitude(t, STOCHASTIC) * scales[j], x[j]),)
            else:
                nibble = ((e2m1_index(t, STOCHASTIC) & 7) | (bits(x[j]) >> 28 & 8)) << (4 * i)
                grown = grown + (nibble if i == 0 else words[j] | nibble,)
        if VALUES:
            store_values(
                advance(values_ptr, row * columns + column, OUT_BF16),
                columns * i,
                v,
                inside & (first + i < count),
                OUT_BF16,
                ASM,
            )
        else:
            words = grown
    if not VALUES:
        out = ()
        for j in tl.static_range(8):
            out = out + (tl.where(bads[j], 0, words[j]).to(tl.uint32),)
        t = tl.reshape(join8(out), (W, LANES, K, 8))
        t = tl.reshape(tl.permute(t, (2, 3, 0, 1)), (K * 8, W * LANES))
        store_transposed(codes_ptr, t, lead, tiles, columns, blocks * (BLOCK // 8), K * 8, W * LANES)


@triton.jit
def store_transposed(
    codes_ptr, words, lead, tiles, columns, per_row, COLUMNS: tl.constexpr, WORDS: tl.constexpr
):
    """uint32 [COLUMNS, WORDS], the `tiles` of a column, to int32 [lead, C, per_row]."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    w = tiles * WORDS + tl.arange(0, WORDS)[None, :]
    at = (lead * columns + c) * per_row + w
    tl.store(codes_ptr + at, words.to(tl.int32, bitcast=True), mask=(c < columns) & (w < per_row))
