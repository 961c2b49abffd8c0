"""What the column kernels read: values, or NVFP4 codes decoded on the way. A thread has eight tokens."""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4, nvfp4_values
from nybble.kernels.cuda.registers import (
    advance,
    even_odd_bytes,
    floats,
    high_bytes,
    load_raw,
    max_pairs,
    pair_bits,
    times,
    top_bytes,
    umax,
)

BF16 = tl.constexpr(0)
FP32 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)


@triton.jit
def block_bounds(
    start_ptr,
    count_ptr,
    block,
    inside,
    tokens,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """(first token, tokens) of padded blocks; not one where none is."""
    if GROUPED:
        start = tl.load(start_ptr + block, mask=inside, other=0)
        return start, tl.load(count_ptr + block, mask=inside, other=0)
    else:
        return block * BLOCK, tl.minimum(tokens - block * BLOCK, BLOCK)


@triton.jit
def load_sources(
    x_ptr,
    codes_ptr,
    scales_ptr,
    sdec_ptr,
    index_ptr,
    factor_ptr,
    x_start,
    row_stride,
    row,
    columns,
    column,
    inside,
    first,
    count,
    SOURCE: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    ASM: tl.constexpr,
):
    """(raws, sfs, sdecs) of eight features of eight tokens: pairs, FP32, or codes and their scales.

    `x_start` (int64) is the element of x where its token 0 begins; codes are those of its row `row`. With
    HAS_INDEX either is that of row index[row]. With HAS_FACTOR x is times factor[row], in its own type, or
    the outer scale of the codes is. Tokens from `count` on are 0.
    """
    raws = ()
    sfs = ()
    sdecs = ()
    if SOURCE == NVFP4:
        words, per_row = columns >> 3, (columns + 15) >> 4
        if HAS_INDEX:
            index_ptr += row
        else:
            codes_ptr += row * words + (column >> 3)
            scales_ptr += (row if SCALE_ROWS == 1 else row * 0) * per_row + (column >> 4)
            if SDEC_ROWS:
                sdec_ptr += row
        for i in tl.static_range(8):
            mask = inside & (first + i < count)
            if HAS_INDEX:
                at = tl.load(index_ptr + i, mask=mask, other=0).to(tl.int64)
                word = load_nvfp4(codes_ptr, at * words + (column >> 3), mask)
                sf = load_factor(scales_ptr, (at // SCALE_ROWS) * per_row + (column >> 4), mask, ASM)
            else:
                at = i
                word = load_nvfp4(codes_ptr, i * words, mask)
                tall = i if SCALE_ROWS == 1 else (row + i) // SCALE_ROWS
                sf = load_factor(scales_ptr, tall * per_row, mask, ASM)
            s_dec = tl.load(sdec_ptr + at, mask=mask, other=0.0) if SDEC_ROWS else tl.load(sdec_ptr)
            if HAS_FACTOR:
                s_dec *= tl.load(factor_ptr + (row + i), mask=mask, other=0.0)
                # Magnitudes are of positive scales: the sign goes to the codes.
                word ^= (bits(s_dec) >> 31) * 0x88888888
                s_dec = tl.abs(s_dec)
            raws = raws + ((word,),)
            sfs = sfs + (sf,)
            sdecs = sdecs + (s_dec,)
    else:
        if not HAS_INDEX:
            x_ptr = advance(x_ptr, x_start, SOURCE == BF16)
        for i in tl.static_range(8):
            mask = inside & (first + i < count)
            if HAS_INDEX:
                at = tl.load(index_ptr + (row + i), mask=mask, other=0).to(tl.int64)
                raw = load_raw(x_ptr, at * row_stride + column, mask, SOURCE == BF16)
            else:
                raw = load_raw(x_ptr, i * row_stride, mask, SOURCE == BF16)
            if HAS_FACTOR:
                factor = tl.load(factor_ptr + (row + i), mask=mask, other=0.0)
                raw = times(raw, factor, SOURCE == BF16, ASM)
            raws = raws + (raw,)
            sfs = sfs + (0.0,)
            sdecs = sdecs + (0.0,)
    return raws, sfs, sdecs


@triton.jit
def source_magnitudes(raw, sf, s_dec, SOURCE: tl.constexpr, ASM: tl.constexpr):
    """Eight magnitudes, FP32; their signs, where x is read, are still theirs."""
    if SOURCE == NVFP4:
        a = nvfp4_values(raw[0], sf, False, ASM)
        out = ()
        for j in tl.static_range(8):
            out = out + (a[j] * s_dec,)
        return out
    else:
        return floats(raw, SOURCE == BF16)


@triton.jit
def source_floats(raw, sf, s_dec, SOURCE: tl.constexpr, ASM: tl.constexpr):
    """Eight signed values, FP32."""
    if SOURCE == NVFP4:
        x = nvfp4_values(raw[0], sf, True, ASM)
        out = ()
        for j in tl.static_range(8):
            out = out + (x[j] * s_dec,)
        return out
    else:
        return floats(raw, SOURCE == BF16)


@triton.jit
def tile_maxima(raws, sfs, sdecs, SOURCE: tl.constexpr, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """Bits of the largest magnitude of each of eight features over a thread's eight tokens; NaN above Inf."""
    out = ()
    if SOURCE == BF16:
        for k in tl.static_range(4):
            m = raws[0][k]
            for i in tl.static_range(1, 8):
                m = max_pairs(m, raws[i][k], ASM)
            out = out + pair_bits(m)
    elif SOURCE == FP32:
        for j in tl.static_range(8):
            m = bits(raws[0][j]) & 0x7FFFFFFF
            for i in tl.static_range(1, 8):
                m = umax(m, bits(raws[i][j]) & 0x7FFFFFFF)
            out = out + (m,)
    else:
        # The products that rounding takes too: magnitudes where it is stochastic, else signed values.
        for i in tl.static_range(8):
            if STOCHASTIC:
                a = source_magnitudes(raws[i], sfs[i], sdecs[i], SOURCE, ASM)
            else:
                a = source_floats(raws[i], sfs[i], sdecs[i], SOURCE, ASM)
            larger = ()
            for j in tl.static_range(8):
                if STOCHASTIC:
                    larger = larger + (bits(a[j]) if i == 0 else umax(out[j], bits(a[j])),)
                elif i == 0:
                    larger = larger + (tl.abs(a[j]),)
                else:
                    larger = larger + (tl.maximum(out[j], tl.abs(a[j]), propagate_nan=tl.PropagateNan.ALL),)
            out = larger
        if not STOCHASTIC:
            larger = ()
            for j in tl.static_range(8):
                larger = larger + (bits(out[j]) & 0x7FFFFFFF,)
            out = larger
    return out


@triton.jit
def column_signs(raws, first, SOURCE: tl.constexpr, ASM: tl.constexpr):
    """Eight words whose bits 7, 15, 23, 31 are the signs of a feature at tokens first .. first + 3."""
    out = ()
    if SOURCE == BF16:
        for k in tl.static_range(4):
            low = high_bytes(raws[first][k], raws[first + 1][k], ASM)
            high = high_bytes(raws[first + 2][k], raws[first + 3][k], ASM)
            even, odd = even_odd_bytes(low, high, ASM)
            out = out + (even, odd)
    elif SOURCE == FP32:
        for j in tl.static_range(8):
            out = out + (
                top_bytes(
                    bits(raws[first][j]),
                    bits(raws[first + 1][j]),
                    bits(raws[first + 2][j]),
                    bits(raws[first + 3][j]),
                    ASM,
                ),
            )
    else:
        e0, o0 = even_odd_bytes(raws[first][0], raws[first + 1][0], ASM)
        e1, o1 = even_odd_bytes(raws[first + 2][0], raws[first + 3][0], ASM)
        b0, b2 = even_odd_bytes(e0, e1, ASM)
        b1, b3 = even_odd_bytes(o0, o1, ASM)
        out = (b0 << 4, b0, b1 << 4, b1, b2 << 4, b2, b3 << 4, b3)
    return out
