"""Quantise along the tokens (axis -2), and re-round NVFP4 codes along them: blocks never cross a token group.

A thread owns 8 tokens x 8 features: one Philox call serves the features of a token, one word of output the
tokens of a feature. The lanes of a warp cover one block of tokens, so a block's maximum takes a few shuffles.
Codes leave through a transposition of 32-bit words.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import load_key
from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.finish_columns import finish_e2m1, finish_e4m3
from nybble.kernels.cuda.registers import join8
from nybble.kernels.cuda.sources import block_bounds, load_sources, tile_maxima
from nybble.kernels.cuda.whole_columns import store_whole_scales


@triton.jit
def over_lanes(m, W: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr):
    """Maximum of uint32 [W * LANES * K] over its middle factor: [W, K]."""
    return tl.max(tl.reshape(m.to(tl.int32), (W, LANES, K)), axis=1).to(tl.uint32)


@triton.jit
def to_lanes(t, W: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr):
    """The inverse: [W, K] to every lane of [W * LANES * K]."""
    return tl.reshape(tl.broadcast_to(t[:, None, :], (W, LANES, K)), (W * LANES * K,))


@triton.jit(do_not_specialize=["draw_columns", "tokens", "blocks", "tag"])
def quantize_columns(
    x_ptr,
    source_codes_ptr,
    source_scales_ptr,
    sdec_ptr,
    codes_ptr,  # int32 words [lead, C, padded T]
    scales_ptr,  # uint8 or FP32 [lead, C, blocks]; FP32 [lead, C] or [G, C] if WHOLE
    values_ptr,  # [lead, T, C]
    amax_ptr,
    key_ptr,
    rows_ptr,
    start_ptr,  # of each block, if GROUPED: its first row,
    count_ptr,  # its rows, -1 for padding,
    group_ptr,  # and its group
    index_ptr,  # int32 [T]: row of x or of the codes that each token is, if HAS_INDEX
    factor_ptr,  # FP32 [T]: what x is multiplied by, if HAS_FACTOR
    row_stride,
    lead_stride,
    columns,  # of x and of the outputs, a multiple of 8
    draw_columns,  # of the logical tensor
    tokens,
    blocks,
    tag,
    E2M1: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # a block is a whole column (of its group), its amax bits are read, BLOCK is a tile
    OUTER: tl.constexpr,  # 0: none, 1: one a feature, 2: one a leading index, 3: one a group, 4: one
    OUTER_MAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VALUES: tl.constexpr,
    SOURCE: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OUT_BF16: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    W: tl.constexpr,  # warps, one block of tokens each
    ASM: tl.constexpr,
):
    """Blocks of BLOCK tokens of x [lead, T, C], C a multiple of 8."""
    LANES: tl.constexpr = BLOCK // 8
    K: tl.constexpr = 32 // LANES
    lead = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * K + n % K) * 8
    block = tl.program_id(1) * W + n // 32
    first = (n // K) % LANES * 8
    has_block = block < blocks
    start, count = block_bounds(start_ptr, count_ptr, block, has_block, tokens, BLOCK, GROUPED)
    inside = has_block & (column < columns)
    row = (lead * tokens + start + first).to(tl.int64)  # of the thread's first token, in [lead * T, C]
    column = column.to(tl.int64)
    if WHOLE and not VALUES:
        store_whole_scales(scales_ptr, amax_ptr, group_ptr, lead, columns, blocks, GROUPED, 8 * K, W, ASM)

    raws, sfs, sdecs = load_sources(
        x_ptr,
        source_codes_ptr,
        source_scales_ptr,
        sdec_ptr,
        index_ptr,
        factor_ptr,
        lead * lead_stride + (start + first).to(tl.int64) * row_stride + column,
        row_stride,
        row,
        columns,
        column,
        inside,
        first,
        count,
        SOURCE,
        SDEC_ROWS,
        SCALE_ROWS,
        HAS_INDEX,
        HAS_FACTOR,
        ASM,
    )

    if not WHOLE:
        maxima = tile_maxima(raws, sfs, sdecs, SOURCE, STOCHASTIC, ASM)
    wk = (tl.program_id(0) * K + tl.arange(0, K))[None, :] * 8
    wb = (tl.program_id(1) * W + tl.arange(0, W))[:, None]
    if WHOLE:
        matrix = lead + wb * 0
        if GROUPED:
            matrix = lead * 0 + tl.load(group_ptr + wb, mask=wb < blocks, other=0)
    muls = ()
    bads = ()
    scales = ()
    stored = ()
    for j in tl.static_range(8):
        if WHOLE:
            m = tl.load(
                amax_ptr + matrix * columns + (wk + j), mask=(wk + j < columns) & (wb < blocks), other=0
            )
            m = m.to(tl.uint32, bitcast=True)
        else:
            m = over_lanes(maxima[j], W, LANES, K)
        bad = m >= rule.INFINITE
        if SCALE == rule.E4M3:
            which = lead + (wk + wb) * 0
            if OUTER == 1:
                which = lead * columns + (wk + j + wb * 0)
            elif OUTER == 3:
                which = lead * 0 + tl.load(group_ptr + wb + wk * 0, mask=wb < blocks, other=0)
            elif OUTER == 4:
                which = lead * 0 + (wk + wb) * 0
            s_enc = rule.encode_scale(
                tl.load(amax_ptr + which, mask=(wk + j < columns) & (wb < blocks), other=0.0), OUTER_MAX
            )
            s_dec = tl.div_rn(tl.full(s_enc.shape, 1.0, tl.float32), s_enc)
            byte, scale = rule.round_e4m3(value(m) * (s_enc * (1.0 / 6.0)), ASM)
            mul = rule.e4m3_multiplier(scale, s_dec, ASM)
            stored = stored + (tl.where(bad, 0x7F, byte).to(tl.uint8),)
            scale = tl.where(bad, float("nan"), scale)
        elif SCALE == rule.FP32:
            mul = rule.fp32_multiplier(value(m))
            scale = tl.where(bad, float("nan"), rule.reciprocal(mul, ASM))
            stored = stored + (scale,)
        else:
            byte = rule.e8m0_byte(m, ELEMENT_MAX, SCALE)
            mul = rule.e8m0_multiplier(byte)
            scale = rule.e8m0_value(byte)
            stored = stored + (byte.to(tl.uint8),)
        muls = muls + (to_lanes(mul, W, LANES, K),)
        bads = bads + (to_lanes(bad.to(tl.int32), W, LANES, K) != 0,)
        scales = scales + (to_lanes(scale, W, LANES, K),)

    if not VALUES and not WHOLE:
        out = tl.reshape(tl.permute(join8(stored), (1, 2, 0)), (K * 8, W))
        c = tl.program_id(0) * (K * 8) + tl.arange(0, K * 8)[:, None]
        b = tl.program_id(1) * W + tl.arange(0, W)[None, :]
        ok = (c < columns) & (b < blocks)
        if GROUPED and SCALE == rule.FP32:
            used = tl.load(count_ptr + b + c * 0, mask=ok, other=-1) >= 0
            out = tl.where(used, out, 0.0)
        tl.store(scales_ptr + ((lead * columns + c) * blocks + b), out, mask=ok)

    places = ()  # of the draws of each token
    key = (0, 0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
        for i in tl.static_range(8):
            e_row = row
            further = draw_columns.to(tl.int64) * i
            if HAS_ROWS:
                e_row = tl.load(rows_ptr + (row + i), mask=inside & (first + i < count), other=0)
                further = 0
            places = places + ((e_row * draw_columns + column, further),)

    if E2M1:
        finish_e2m1(
            raws,
            sfs,
            sdecs,
            places,
            key,
            tag.to(tl.uint32),
            muls,
            bads,
            scales,
            row,
            first,
            count,
            column,
            inside,
            lead,
            tl.program_id(1),
            columns,
            blocks,
            codes_ptr,
            values_ptr,
            BLOCK,
            STOCHASTIC,
            ALIGNED,
            VALUES,
            SOURCE,
            OUT_BF16,
            W,
            ASM,
        )
    else:
        finish_e4m3(
            raws,
            sfs,
            sdecs,
            places,
            key,
            tag.to(tl.uint32),
            muls,
            bads,
            scales,
            row,
            first,
            count,
            column,
            inside,
            lead,
            tl.program_id(1),
            columns,
            blocks,
            codes_ptr,
            values_ptr,
            SCALE,
            BLOCK,
            STOCHASTIC,
            ALIGNED,
            VALUES,
            SOURCE,
            OUT_BF16,
            W,
            ASM,
        )
