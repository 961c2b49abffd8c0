"""Quantise along the last axis: blocks of 16, 32 or 128 elements, or a whole row.

A thread owns units of 8 or 16 elements, a block or part of one. A program takes one row or a part of one;
tensors whose rows need not be told apart come as a single long row.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import draw_words, load_key
from nybble.kernels.cuda.elements import (
    bits,
    e2m1_indices,
    e2m1_magnitude,
    e2m1_word,
    e4m3_rounded,
    e4m3_values,
    e4m3_word_nearest,
    e4m3_word_stochastic,
    value,
    with_sign,
)
from nybble.kernels.cuda.gates import load_gated
from nybble.kernels.cuda.jit import Launched
from nybble.kernels.cuda.registers import (
    eight,
    finite_magnitude,
    floats,
    join4,
    load_raw,
    magnitude,
    magnitude_bits,
    magnitudes,
    max_magnitudes,
    sign_bytes,
    sign_nibbles,
    store_values,
    store_values16,
    umax,
)

OUTER_NONE = tl.constexpr(0)
OUTER_ROW = tl.constexpr(1)
OUTER_GIVEN = tl.constexpr(2)


@triton.jit
def load_unit(x_ptr, row_start, unit, mask, CHUNKS: tl.constexpr, BF16: tl.constexpr):
    """The raw chunks of each unit."""
    raws = ()
    for c in tl.static_range(CHUNKS):
        raws = raws + (load_raw(x_ptr, row_start + unit * (8 * CHUNKS) + 8 * c, mask, BF16),)
    return raws


@triton.jit
def load_row(
    x_ptr,
    row_start,
    unit,
    mask,
    units,
    factor,
    GATED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
):
    """The raw chunks of each unit of x, or of the SwiGLU of its two halves, each `units` units wide."""
    if GATED:
        raws = ()
        for c in tl.static_range(CHUNKS):
            at = row_start + unit * (8 * CHUNKS) + 8 * c
            half = units * (8 * CHUNKS)
            raws = raws + (load_gated(x_ptr, at, half, mask, factor, HAS_FACTOR, GATE_CAP, UP_CAP, ASM),)
        return raws
    else:
        return load_unit(x_ptr, row_start, unit, mask, CHUNKS, BF16)


@triton.jit
def unit_magnitude(raws, CHUNKS: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """FP32 bits of the largest magnitude of each unit."""
    m = magnitude(raws[0], BF16, ASM)
    for c in tl.static_range(1, CHUNKS):
        m = max_magnitudes(m, magnitude(raws[c], BF16, ASM), BF16, ASM)
    return magnitude_bits(m, BF16)


@triton.jit
def finite_unit_magnitude(raws, CHUNKS: tl.constexpr, BF16: tl.constexpr):
    """The same over finite elements."""
    m = finite_magnitude(raws[0], BF16)
    for c in tl.static_range(1, CHUNKS):
        m = umax(m, finite_magnitude(raws[c], BF16))
    return m


@triton.jit
def top(m):
    """Largest entry of a uint32 tensor below 2^31, as a scalar."""
    return tl.max(m.to(tl.int32), axis=0).to(tl.uint32)


@triton.jit
def over_six_error(
    a, t, sf, amax, OUTER_MAX: tl.constexpr, error, FAST: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """`error` plus the squared errors of eight magnitudes a, one after the other.

    FAST divides by a product and one correction, which is exact where no intermediate result is subnormal.
    """
    for j in tl.static_range(8):
        v = (e2m1_magnitude(t[j], STOCHASTIC) * sf) * amax
        if FAST:
            q = v * (1.0 / OUTER_MAX)
            q = tl.fma(tl.fma(q, -OUTER_MAX, v), 1.0 / OUTER_MAX, q)
        else:
            q = tl.div_rn(v, tl.full(v.shape, OUTER_MAX, tl.float32))
        d = q - a[j]
        error = error + d * d
    return error


@triton.jit
def store_words(codes_ptr, index, words, mask, COUNT: tl.constexpr):
    """COUNT uint32 of each unit to int32 memory, `index` the first."""
    if COUNT == 1:
        tl.store(codes_ptr + index, words[0].to(tl.int32, bitcast=True), mask=mask)
    elif COUNT == 2:
        at = index[:, None] + tl.arange(0, 2)[None, :]
        tl.store(codes_ptr + at, tl.join(words[0], words[1]).to(tl.int32, bitcast=True), mask=mask[:, None])
    else:
        at = index[:, None] + tl.arange(0, 4)[None, :]
        for k in tl.static_range(COUNT // 4):
            w = join4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
            tl.store(codes_ptr + (at + 4 * k), w.to(tl.int32, bitcast=True), mask=mask[:, None])


@Launched
@triton.jit(do_not_specialize=["code_stride", "scale_stride", "amax_stride", "units", "groups", "tag"])
def quantize_rows(
    x_ptr,  # BF16 as int32 pairs, or FP32
    codes_ptr,  # int32 words
    scales_ptr,  # uint8, or FP32 for FP8 formats
    values_ptr,  # like x_ptr
    amax_ptr,  # outer amaxes: written if OUTER_ROW, read if OUTER_GIVEN
    key_ptr,
    rows_ptr,
    offs_ptr,
    group_ptr,  # int32: which outer amax a row has, if HAS_GROUP
    factor_ptr,  # FP32: what each row of gate and up is multiplied by, if HAS_FACTOR
    place_ptr,  # int32 [R * COPIES]: rows of the values of each row, if COPIES > 0
    row_stride,  # of x, in elements
    columns,  # C of the logical tensor, by which draws are counted
    value_stride,  # of a row of values, in elements
    code_stride,  # of a row of codes, in units
    scale_stride,  # of a row of block scales
    amax_stride,  # from row to row, where they are written
    units,  # a row
    groups,
    tag,  # layer << 8 | operand
    GATE_CAP: tl.constexpr,  # of the soft-capped SwiGLU, 0 for the plain one; see GATED
    UP_CAP: tl.constexpr,
    GATED: tl.constexpr,  # x is gate and up beside each other, and their SwiGLU is what is quantised
    HAS_FACTOR: tl.constexpr,
    CODES: tl.constexpr,  # whether codes and scales are stored
    COPIES: tl.constexpr,
    E2M1: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,  # 0: the whole row is a block
    OUTER: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    OVER_SIX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VALUES: tl.constexpr,
    IN_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_OFFS: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROW_AXIS: tl.constexpr,  # of the grid; the other one counts tiles of a row
    LOOPS: tl.constexpr,  # tiles of a row that one program goes through
    N: tl.constexpr,  # units of a tile
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Codes and scales, or values, or both, of rows of x [R, units * 8 * CHUNKS], padded with zeros."""
    row = tl.program_id(ROW_AXIS).to(tl.int64)
    tile = tl.program_id(1 - ROW_AXIS)
    inside = True
    if HAS_OFFS:
        inside = row < tl.load(offs_ptr + groups - 1)
    row_start = row * row_stride
    WHOLE_ROW: tl.constexpr = OUTER == OUTER_ROW or BLOCK_UNITS == 0
    outer_amax = 0.0
    row_bad = False
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + row)
    start = tile.to(tl.int64) * (N * LOOPS) + tl.arange(0, N)
    if LOOPS == 1:
        raws = load_row(
            x_ptr, row_start, start, (start < units) & inside, units, factor,
            GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
        )  # fmt: skip
        m = unit_magnitude(raws, CHUNKS, IN_BF16, ASM)
    if WHOLE_ROW:
        if LOOPS == 1:
            t = top(m)
            row_bad = t >= rule.INFINITE
            if row_bad:  # a second look, at finite elements
                t = top(finite_unit_magnitude(raws, CHUNKS, IN_BF16))
        else:
            most = tl.zeros((N,), tl.uint32)
            for i in range(LOOPS):
                u = start + i * N
                more = load_row(
                    x_ptr, row_start, u, (u < units) & inside, units, factor,
                    GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
                )  # fmt: skip
                most = umax(most, unit_magnitude(more, CHUNKS, IN_BF16, ASM))
            t = top(most)
            row_bad = t >= rule.INFINITE
            if row_bad:
                most = tl.zeros((N,), tl.uint32)
                for i in range(LOOPS):
                    u = start + i * N
                    more = load_row(
                        x_ptr, row_start, u, (u < units) & inside, units, factor,
                        GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
                    )  # fmt: skip
                    most = umax(most, finite_unit_magnitude(more, CHUNKS, IN_BF16))
                t = top(most)
        outer_amax = value(t)
        if OUTER == OUTER_ROW:
            tl.store(amax_ptr + row * amax_stride, outer_amax)
    if OUTER == OUTER_GIVEN:
        which = row
        if HAS_GROUP:
            which = tl.load(group_ptr + row).to(tl.int64)
        outer_amax = tl.load(amax_ptr + which)
    s_enc = 1.0
    s_dec = 1.0
    if OUTER != OUTER_NONE:
        s_enc = rule.encode_scale(outer_amax, OUTER_MAX)
        s_dec = tl.div_rn(1.0, s_enc)
    e_row = row
    if HAS_ROWS:
        e_row = tl.load(rows_ptr + row)
    key = (0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
    if LOOPS == 1:
        finish_units(
            raws, m, start, start < units, row, e_row, row_bad, outer_amax, s_enc, s_dec,
            codes_ptr, scales_ptr, values_ptr, place_ptr, key, columns, value_stride, code_stride,
            scale_stride, units, tag, E2M1, ELEMENT_MAX, SCALE, BLOCK_UNITS, OUTER_MAX, OVER_SIX, STOCHASTIC,
            CODES, VALUES, COPIES, IN_BF16, OUT_BF16, ALIGNED, 0, N, CHUNKS, ASM,
        )  # fmt: skip
    else:
        for i in range(LOOPS):
            u = start + i * N
            more = load_row(
                x_ptr, row_start, u, (u < units) & inside, units, factor,
                GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
            )  # fmt: skip
            mm = unit_magnitude(more, CHUNKS, IN_BF16, ASM)
            finish_units(
                more, mm, u, u < units, row, e_row, row_bad, outer_amax, s_enc, s_dec,
                codes_ptr, scales_ptr, values_ptr, place_ptr, key, columns, value_stride, code_stride,
                scale_stride, units, tag, E2M1, ELEMENT_MAX, SCALE, BLOCK_UNITS, OUTER_MAX, OVER_SIX,
                STOCHASTIC, CODES, VALUES, COPIES, IN_BF16, OUT_BF16, ALIGNED, 0, N, CHUNKS, ASM,
            )  # fmt: skip


@triton.jit
def finish_units(
    raws,
    m,
    u,
    mask,
    row,
    e_row,
    row_bad,
    outer_amax,
    s_enc,
    s_dec,
    codes_ptr,
    scales_ptr,
    values_ptr,
    place_ptr,
    key,
    columns,
    value_stride,
    code_stride,
    scale_stride,
    units,
    tag,
    E2M1: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    OVER_SIX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CODES: tl.constexpr,
    VALUES: tl.constexpr,
    COPIES: tl.constexpr,
    IN_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    SQUARE: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scale, round and store the units u of one tile.

    m is the magnitude (bits) of each unit, or of its block where blocks are square; `row` and `e_row` are
    scalars, or one row a unit in that case. `row_bad`: whether a block that is a whole row holds NaN or Inf.
    """
    if SQUARE == 0 and BLOCK_UNITS > 1:
        most = tl.max(tl.reshape(m.to(tl.int32), (N // BLOCK_UNITS, BLOCK_UNITS)), axis=1)
        most = tl.broadcast_to(most[:, None], (N // BLOCK_UNITS, BLOCK_UNITS))
        m = tl.reshape(most, (N,)).to(tl.uint32)
    bad = m >= rule.INFINITE
    if BLOCK_UNITS == 0:
        m = bits(tl.full((N,), 0.0, tl.float32) + outer_amax)
        bad = bad | row_bad
    draws = ()
    if STOCHASTIC:
        e = e_row * columns + u * (8 * CHUNKS)
        for c in tl.static_range(CHUNKS):
            draws = draws + (draw_words(e + 8 * c, key, tag.to(tl.uint32), ALIGNED),)
    else:
        for _ in tl.static_range(CHUNKS):
            draws = draws + (0,)

    if SCALE == rule.E4M3:
        amax_b = value(m)
        if OVER_SIX:
            base = tl.div_rn(amax_b, tl.full((N,), 6.0, tl.float32)) * s_enc
            byte, sf = rule.round_e4m3(base, ASM)
            byte4, sf4 = rule.round_e4m3(base * 1.5, ASM)
            mul4 = rule.e4m3_multiplier(sf4, s_dec, ASM)
        else:
            byte, sf = rule.round_e4m3(amax_b * (s_enc * (1.0 / 6.0)), ASM)
        mul = rule.e4m3_multiplier(sf, s_dec, ASM)
        byte = tl.where(bad, 0x7F, byte).to(tl.uint32)
        scale = tl.where(bad, float("nan"), sf)
    elif SCALE == rule.FP32:
        mul = rule.fp32_multiplier(value(m))
        scale = tl.where(bad, float("nan"), rule.reciprocal(mul, ASM))
    else:
        byte = rule.e8m0_byte(m, ELEMENT_MAX, SCALE)
        byte = tl.where(bad, 255, byte).to(tl.uint32)
        mul = rule.e8m0_multiplier(byte)
        scale = rule.e8m0_value(byte)

    if OVER_SIX:
        error6 = tl.full((N,), 0.0, tl.float32)
        error4 = tl.full((N,), 0.0, tl.float32)
        # The smallest value but 0 is about 2^-12 of the amax. The interpreter has no FMA of one rounding.
        if ASM and outer_amax > 2.0**-60 and outer_amax < 2.0**100:
            for c in tl.static_range(CHUNKS):
                a = magnitudes(raws[c], IN_BF16)
                t6 = e2m1_indices(a, mul, draws[c], STOCHASTIC, ASM)
                t4 = e2m1_indices(a, mul4, draws[c], STOCHASTIC, ASM)
                error6 = over_six_error(a, t6, sf, outer_amax, OUTER_MAX, error6, True, STOCHASTIC)
                error4 = over_six_error(a, t4, sf4, outer_amax, OUTER_MAX, error4, True, STOCHASTIC)
        else:
            for c in tl.static_range(CHUNKS):
                a = magnitudes(raws[c], IN_BF16)
                t6 = e2m1_indices(a, mul, draws[c], STOCHASTIC, ASM)
                t4 = e2m1_indices(a, mul4, draws[c], STOCHASTIC, ASM)
                error6 = over_six_error(a, t6, sf, outer_amax, OUTER_MAX, error6, False, STOCHASTIC)
                error4 = over_six_error(a, t4, sf4, outer_amax, OUTER_MAX, error4, False, STOCHASTIC)
        four = (error4 < error6) & ~bad
        byte = tl.where(four, byte4, byte)
        scale = tl.where(four, sf4, scale)
        mul = tl.where(four, mul4, mul)

    if CODES:
        if SQUARE > 0:
            tall = (row // SQUARE) * tl.cdiv(units, BLOCK_UNITS) + u // BLOCK_UNITS
            corner = mask & (row % SQUARE == 0) & (u % BLOCK_UNITS == 0)
            tl.store(scales_ptr + tall, scale if SCALE == rule.FP32 else byte.to(tl.uint8), mask=corner)
        elif BLOCK_UNITS == 0:
            tl.store(scales_ptr + (row + u * 0), scale, mask=u == 0)
        elif BLOCK_UNITS == 1:
            tl.store(scales_ptr + (row * scale_stride + u), byte.to(tl.uint8), mask=mask)
        else:
            stored = scale if SCALE == rule.FP32 else byte.to(tl.uint8)
            at = row * scale_stride + u // BLOCK_UNITS
            tl.store(scales_ptr + at, stored, mask=mask & (u % BLOCK_UNITS == 0))

    words = ()
    values = ()
    for c in tl.static_range(CHUNKS):
        x = floats(raws[c], IN_BF16)
        if E2M1:
            t = e2m1_indices(magnitudes(raws[c], IN_BF16), mul, draws[c], STOCHASTIC, ASM)
            if VALUES:
                for j in tl.static_range(8):
                    values = values + (with_sign(e2m1_magnitude(t[j], STOCHASTIC) * scale, x[j]),)
            if CODES:
                words = words + (
                    tl.where(bad, 0, e2m1_word(t, sign_nibbles(raws[c], IN_BF16, ASM), STOCHASTIC)).to(
                        tl.uint32
                    ),
                )
        else:
            w0, w1 = e4m3_words(raws[c], mul, draws[c], STOCHASTIC, SCALE, IN_BF16, ASM)
            if VALUES:
                q = e4m3_values(w0, ASM) + e4m3_values(w1, ASM)
                for j in tl.static_range(8):
                    values = values + (q[j] * scale,)
            if CODES:
                words = words + (
                    tl.where(bad, 0x7F7F7F7F, w0).to(tl.uint32),
                    tl.where(bad, 0x7F7F7F7F, w1).to(tl.uint32),
                )
    if VALUES:
        if COPIES == 0:
            store_unit(values_ptr, row * value_stride, u, values, mask, OUT_BF16, CHUNKS, ASM)
        for copy in tl.static_range(COPIES):
            to = tl.load(place_ptr + row * COPIES + copy).to(tl.int64)
            store_unit(values_ptr, to * value_stride, u, values, mask, OUT_BF16, CHUNKS, ASM)
    if CODES:
        PER_UNIT: tl.constexpr = CHUNKS if E2M1 else 2 * CHUNKS
        store_words(codes_ptr, (row * code_stride + u) * PER_UNIT, words, mask, PER_UNIT)


@triton.jit
def store_unit(
    values_ptr, start, u, values, mask, OUT_BF16: tl.constexpr, CHUNKS: tl.constexpr, ASM: tl.constexpr
):
    """The values of units u of the row that begins at `start`."""
    at = start + u * (8 * CHUNKS)
    if CHUNKS == 2:
        store_values16(values_ptr, at, values, mask, OUT_BF16, ASM)
    else:
        for c in tl.static_range(CHUNKS):
            store_values(values_ptr, at + 8 * c, eight(values, 8 * c), mask, OUT_BF16, ASM)


@triton.jit
def e4m3_words(
    raw, mul, draws, STOCHASTIC: tl.constexpr, SCALE: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):
    """Eight elements times mul as E4M3 bytes in two uint32."""
    if STOCHASTIC:
        # Under the rounded-up scale nothing exceeds 448 by enough to round beyond it.
        CLAMP: tl.constexpr = SCALE != rule.E8M0_UP
        a = magnitudes(raw, BF16)
        signs = sign_bytes(raw, BF16, ASM)
        s = ()
        for j in tl.static_range(8):
            s = s + (e4m3_rounded(a[j] * mul, draws, j, ASM, CLAMP),)
        return (
            e4m3_word_stochastic(s[0], s[1], s[2], s[3], signs[0], ASM),
            e4m3_word_stochastic(s[4], s[5], s[6], s[7], signs[1], ASM),
        )
    else:
        x = floats(raw, BF16)
        return (
            e4m3_word_nearest(x[0] * mul, x[1] * mul, x[2] * mul, x[3] * mul, ASM),
            e4m3_word_nearest(x[4] * mul, x[5] * mul, x[6] * mul, x[7] * mul, ASM),
        )
