"""NVFP4 codes of rows to MXFP8 codes or values along the tokens, drawn, faster than `columns.py`.

A program is one warp without barriers: a block of 32 tokens x 64 features, of which a thread owns 8 x 8.
Full tiles whose blocks are usual (`usual_blocks.py`) go the quick way, all others that of `columns.py`.
Scales of codes go to consecutive bytes, which `turn` brings to columns: one byte a column, a write of its
own, keeps the L2 cache busy for half of the time.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda import usual_blocks as usual
from nybble.kernels.cuda import usual_results as results
from nybble.kernels.cuda.draws import load_key, philox
from nybble.kernels.cuda.finish_columns import column_words, store_tokens, words_or_nan
from nybble.kernels.cuda.nvfp4 import nvfp4_factor
from nybble.kernels.cuda.sources import NVFP4, block_bounds, tile_maxima

BLOCK = tl.constexpr(32)
GROUP = tl.constexpr(8)  # tokens of a thread, and features
WIDTH = tl.constexpr(64)  # features of a program
E4M3_MAX = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["draw_columns", "tokens", "blocks", "tag"])
def requantize_columns(
    source_codes_ptr,  # int32 words [rows, C / 8]
    source_scales_ptr,  # uint8 [rows, ceil(C / 16)]
    sdec_ptr,  # FP32, one, or one a row if SDEC_ROWS
    codes_ptr,  # int32 words [lead, C, padded T]
    scales_ptr,  # int16, pairs of bytes [lead, blocks, C]
    values_ptr,  # pairs of BF16 [lead, T, C], in the place of both if VALUES
    key_ptr,
    rows_ptr,  # int64 [T]: row that each token counts as in draws, if HAS_ROWS
    start_ptr,  # of each block, if GROUPED: its first row,
    count_ptr,  # and its rows, -1 for padding
    index_ptr,  # int32 [T]: row of the codes that each token is, if HAS_INDEX
    draw_columns,  # C again: draws are counted faster by it than by the constant
    tokens,
    blocks,
    tag,
    COLUMNS: tl.constexpr,  # C, a multiple of 8: with it rows are immediate offsets
    SDEC_ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    GROUPED: tl.constexpr,
    SIDE: tl.constexpr,  # blocks of the same features whose programs follow each other: they share lines
    ASM: tl.constexpr,
):
    """Blocks of 32 tokens of codes [lead, T, C]."""
    n = tl.arange(0, BLOCK)
    first = n // GROUP * GROUP
    own = n % GROUP * GROUP  # the thread's first feature, from `left`
    left = tl.program_id(0) // SIDE * WIDTH
    block = tl.program_id(1) * SIDE + tl.program_id(0) % SIDE
    start, count = block_bounds(start_ptr, count_ptr, block, block < blocks, tokens, BLOCK, GROUPED)
    row = (tl.program_id(2) * tokens + start).to(tl.int64)
    inside = left + own < COLUMNS
    source_codes_ptr += left // 8
    source_scales_ptr += left // 16
    if HAS_ROWS:
        rows_ptr += row
    if HAS_INDEX:
        index_ptr += row
    else:
        source_codes_ptr += row * (COLUMNS // 8)
        source_scales_ptr += row * ((COLUMNS + 15) // 16)
        if SDEC_ROWS:
            sdec_ptr += row
    # Features behind the last are read as the last eight, and not stored.
    read = tl.minimum(own, COLUMNS - 8 - left)
    key = load_key(key_ptr)  # here, as loads cannot pass what is stored
    tag = tag.to(tl.uint32)
    quick = 0
    if count >= BLOCK:
        words, scales, sdecs, counted = load_tokens(
            source_codes_ptr, source_scales_ptr, sdec_ptr, index_ptr, rows_ptr, first, read, count,
            COLUMNS, SDEC_ROWS, HAS_INDEX, HAS_ROWS, True,
        )  # fmt: skip
        x = ()
        for i in tl.static_range(8):
            a = usual.code_magnitudes(words[i], scales[i], ASM)
            for j in tl.static_range(8):
                x = x + (a[j] * sdecs[i],)
        pairs = usual.scale_pairs(x, ASM)
        stride = draw_columns >> 3
        g = key[4] + left // 8
        most = BLOCK - 1  # or more than any token counts as
        if HAS_ROWS:
            most = counted[0]
            for i in tl.static_range(1, 8):
                most = most | counted[i]
        else:
            g += row * stride
        # Counters of draws of a tile that share their upper word.
        one = ((g + (most * stride.to(tl.int64) + (GROUP - 1))) >> 32 == g >> 32) & (most < 1 << 31)
        one = one & usual.are_usual(pairs, scales, sdecs, SDEC_ROWS, VALUES, ASM)
        quick = tl.min(one.to(tl.int32), axis=0)
        if quick == 1:
            c0 = g.to(tl.uint32) + (own // 8).to(tl.uint32)
            c1 = ((g >> 32) & 0xFFFF).to(tl.uint32) | key[2]
            shifts = usual.shifts(pairs, ASM)
            s = ()
            for i in tl.static_range(8):
                at = c0 + counted[i].to(tl.uint32) * stride.to(tl.uint32)
                draws = philox(at, c1, key[3], tag, key[0], key[1], ASM)
                for j in tl.static_range(8):
                    s = s + (usual.rounded(x[8 * i + j], shifts[j], draws, j, ASM),)
            if VALUES:
                line: tl.constexpr = COLUMNS // 2
                at = values_ptr + (row * line + left // 2) + (first * line + own // 2)[:, None]
                factors = results.value_factors(pairs)
                for i in tl.static_range(8):
                    v = results.bf16_values(s, 8 * i, words[i], factors, ASM)
                    tl.store(at + (tl.arange(0, 4)[None, :] + i * line), v, mask=inside[:, None])
            else:
                out = results.code_words(s, words, ASM)
                store_codes(
                    codes_ptr, scales_ptr, out, results.scale_bytes(pairs), left, own, first, block, blocks,
                    inside, COLUMNS,
                )  # fmt: skip
    if (quick == 0) & ((count > 0) if VALUES else (block < blocks)):
        words, scales, sdecs, counted = load_tokens(
            source_codes_ptr, source_scales_ptr, sdec_ptr, index_ptr, rows_ptr, first, read, count,
            COLUMNS, SDEC_ROWS, HAS_INDEX, HAS_ROWS, False,
        )  # fmt: skip
        raws = ()
        sfs = ()
        places = ()
        for i in tl.static_range(8):
            raws = raws + ((words[i],),)
            sfs = sfs + (nvfp4_factor(scales[i], ASM),)
            e_row = counted[i] if HAS_ROWS else row + counted[i]
            places = places + ((e_row * draw_columns + (left + own), 0),)
        maxima = tile_maxima(raws, sfs, sdecs, NVFP4, True, ASM)
        bytes = ()
        muls = ()
        bads = ()
        values = ()
        for j in tl.static_range(8):
            m = usual.over_lanes(maxima[j])
            bytes = bytes + (rule.e8m0_byte(m, E4M3_MAX, rule.E8M0_UP),)
            muls = muls + (rule.e8m0_multiplier(bytes[j]),)
            bads = bads + (m >= rule.INFINITE,)
            values = values + (rule.e8m0_value(bytes[j]),)
        out = ()
        for h in tl.static_range(2):
            half = column_words(
                raws, sfs, sdecs, places, key, tag, muls, h, rule.E8M0_UP, True, True, NVFP4, ASM
            )
            if VALUES:
                store_tokens(
                    values_ptr, half, values, row + first, first, count, left + own, inside, COLUMNS, h, True,
                    ASM,
                )  # fmt: skip
            else:
                out = out + words_or_nan(half, bads, first, count, h)
        if not VALUES:
            two = ()
            for k in tl.static_range(4):
                two = two + (bytes[2 * k] | (bytes[2 * k + 1] << 16),)
            store_codes(codes_ptr, scales_ptr, out, two, left, own, first, block, blocks, inside, COLUMNS)


@triton.jit
def load_tokens(
    codes_ptr,
    scales_ptr,
    sdec_ptr,
    index_ptr,
    rows_ptr,
    first,
    read,
    count,
    COLUMNS: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Of eight tokens from `first` on: words of eight codes from column `read` on, bytes of their scales
    (uint32), S_dec, and what they count as in draws: int64, or their number in the tile.

    Tokens from `count` on are 0; FULL: none is.
    """
    codes_ptr += read >> 3
    scales_ptr += read >> 4
    if not HAS_INDEX:
        codes_ptr += first * (COLUMNS // 8)
        scales_ptr += first * ((COLUMNS + 15) // 16)
        if SDEC_ROWS:
            sdec_ptr += first
    words = ()
    scales = ()
    sdecs = ()
    counted = ()
    for i in tl.static_range(8):
        mask = None if FULL else first + i < count
        none = None if FULL else 0
        at = i
        if HAS_INDEX:
            at = tl.load(index_ptr + (first + i), mask=mask, other=none).to(tl.int64)
        word = tl.load(codes_ptr + at * (COLUMNS // 8), mask=mask, other=none)
        words = words + (word.to(tl.uint32, bitcast=True),)
        byte = tl.load(scales_ptr + at * ((COLUMNS + 15) // 16), mask=mask, other=none)
        scales = scales + (byte.to(tl.uint32),)
        sdecs = sdecs + (tl.load(sdec_ptr + at, mask=mask, other=none) if SDEC_ROWS else tl.load(sdec_ptr),)
        if HAS_ROWS:
            counted = counted + (tl.load(rows_ptr + (first + i), mask=mask, other=none),)
        else:
            counted = counted + (first + i,)
    return words, scales, sdecs, counted


@triton.jit
def store_codes(
    codes_ptr, scales_ptr, words, pairs, left, own, first, block, blocks, inside, COLUMNS: tl.constexpr
):
    """Sixteen words of eight features, tokens 0 to 3 of each, then 4 to 7; `pairs`: their scales, two a word.

    The threads of a block's tokens store the scales of two features each.
    """
    lead = tl.program_id(2)
    low = tl.where(first == 0, pairs[0], pairs[1])
    pair = tl.where(first < 16, low, tl.where(first == 16, pairs[2], pairs[3]))
    scales_ptr += (lead * blocks + block).to(tl.int64) * (COLUMNS // 2) + left // 2
    tl.store(scales_ptr + (own // 2 + first // 8), (pair | (pair >> 8)).to(tl.int16), mask=inside)
    line = blocks * (BLOCK // 4)
    codes_ptr += (lead * COLUMNS + left).to(tl.int64) * line + block * (BLOCK // 4)
    at = codes_ptr + (own * line + first // 4)[:, None] + tl.arange(0, 2)[None, :]
    for j in tl.static_range(8):
        both = tl.join(words[j], words[8 + j]).to(tl.int32, bitcast=True)
        tl.store(at + j * line.to(tl.int64), both, mask=inside[:, None])


@triton.jit(do_not_specialize=["blocks"])
def turn(rows_ptr, columns_ptr, blocks, columns, B: tl.constexpr, C: tl.constexpr):
    """Bytes [lead, blocks, C] to [lead, C, blocks]."""
    b = tl.program_id(1) * B + tl.arange(0, B)
    c = tl.program_id(0) * C + tl.arange(0, C)
    lead = tl.program_id(2).to(tl.int64) * blocks * columns
    inside = (b < blocks)[:, None] & (c < columns)[None, :]
    x = tl.load(rows_ptr + lead + b[:, None] * columns + c[None, :], mask=inside, other=0)
    inside = (c < columns)[:, None] & (b < blocks)[None, :]
    tl.store(columns_ptr + lead + c[:, None] * blocks + b[None, :], tl.trans(x), mask=inside)
