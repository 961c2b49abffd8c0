"""The last part of quantising along rows: block scale, rounding, codes and values of a tile of units.

A thread owns units of 8 or 16 elements, a block or part of one.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import draw_words
from nybble.kernels.cuda.e2m1 import e2m1_indices, e2m1_magnitude, e2m1_pairs, e2m1_word
from nybble.kernels.cuda.e4m3 import e4m3_rounded, e4m3_values, e4m3_word_nearest, e4m3_word_stochastic
from nybble.kernels.cuda.elements import bits, scaled_magnitude, value, with_sign
from nybble.kernels.cuda.registers import floats, magnitudes, sign_bytes, sign_nibbles
from nybble.kernels.cuda.stores import anchor, store_unit, store_words


@triton.jit
def finish_units(
    raws,
    m,
    u,
    mask,
    tile,
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
    PACKED: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scale, round and store the units u of one tile, counted from unit `tile` of their row.

    m is the magnitude (bits) of each unit, or of its block where blocks are square. What belongs to a row is
    a scalar, or holds one a unit if PACKED; if blocks are square, `row` and `e_row` do, and `tile` is 0.
    `row_bad`: whether a block that is a whole row holds NaN or Inf.
    """
    EACH: tl.constexpr = PACKED or SQUARE > 0  # one `row` a unit
    PAIRS: tl.constexpr = VALUES and ASM and E2M1 and SCALE == rule.E4M3 and IN_BF16 and OUT_BF16
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
        e = e_row * columns + tile * (8 * CHUNKS)
        for c in tl.static_range(CHUNKS):
            draws = draws + (draw_words(e, u * (8 * CHUNKS) + 8 * c, key, tag.to(tl.uint32), ALIGNED),)
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
        if ASM and not PACKED:
            if outer_amax > 2.0**-100 and outer_amax < 2.0**100:
                mul = rule.usual_multiplier(sf, s_dec)
            else:
                mul = rule.e4m3_multiplier(sf, s_dec, ASM)
        else:
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
        least, most = outer_amax, outer_amax
        if PACKED:
            least, most = tl.min(outer_amax, axis=0), tl.max(outer_amax, axis=0)
        if ASM and least > 2.0**-60 and most < 2.0**100:
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
            tl.store(scales_ptr + (row + u * 0), scale, mask=mask & (u + tile == 0))
        else:
            stored = scale if SCALE == rule.FP32 else byte.to(tl.uint8)
            to_ptr, at = anchor(scales_ptr, row * scale_stride + tile // BLOCK_UNITS, False, EACH)
            tl.store(to_ptr + (at + u // BLOCK_UNITS), stored, mask=mask & (u % BLOCK_UNITS == 0))

    words = ()
    values = ()
    for c in tl.static_range(CHUNKS):
        x = floats(raws[c], IN_BF16)
        if E2M1:
            t = e2m1_indices(x, mul, draws[c], STOCHASTIC, ASM)
            if PAIRS:
                values = values + e2m1_pairs(t, raws[c], scale, STOCHASTIC)
            elif VALUES:
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
        for copy in tl.static_range(max(COPIES, 1)):
            to = row
            if COPIES > 0:
                if PACKED:
                    to = tl.load(place_ptr + row * COPIES + copy, mask=mask, other=0).to(tl.int64)
                else:
                    to = tl.load(place_ptr + row * COPIES + copy).to(tl.int64)
            to_ptr, at = anchor(values_ptr, to * value_stride + tile * (8 * CHUNKS), OUT_BF16, EACH)
            store_unit(to_ptr, at, u, values, mask, PAIRS, OUT_BF16, CHUNKS, ASM)
    if CODES:
        PER_UNIT: tl.constexpr = CHUNKS if E2M1 else 2 * CHUNKS
        to_ptr, at = anchor(codes_ptr, (row * code_stride + tile) * PER_UNIT, False, EACH)
        store_words(to_ptr, at + u * PER_UNIT, words, mask, PER_UNIT)


@triton.jit
def e4m3_words(
    raw, mul, draws, STOCHASTIC: tl.constexpr, SCALE: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):
    """Eight elements times mul as E4M3 bytes in two uint32."""
    if STOCHASTIC:
        # Under the rounded-up scale nothing exceeds 448 by enough to round beyond it.
        CLAMP: tl.constexpr = SCALE != rule.E8M0_UP
        x = floats(raw, BF16)
        signs = sign_bytes(raw, BF16, ASM)
        s = ()
        for j in tl.static_range(8):
            s = s + (e4m3_rounded(scaled_magnitude(x[j], mul, ASM), draws, j, ASM, CLAMP),)
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
