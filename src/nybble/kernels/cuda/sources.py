"""What the column kernels read: values, or NVFP4 codes decoded on the way. A thread has eight tokens."""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits, value
from nybble.kernels.cuda.registers import (
    even_odd_bytes,
    floats,
    high_bytes,
    load_e4m3,
    load_nvfp4,
    load_raw,
    magnitudes,
    max_pairs,
    top_bytes,
    umax,
)

BF16 = tl.constexpr(0)
FP32 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)


@triton.jit
def load_source(
    x_ptr,
    codes_ptr,
    scales_ptr,
    sdec_ptr,
    index_ptr,
    first,
    i: tl.constexpr,
    row_stride,
    row,
    columns,
    column,
    mask,
    SOURCE: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    ASM: tl.constexpr,
):
    """(raw, sf, s_dec) of eight features of a thread's token i: pairs, FP32, or a word of codes and scales.

    `first` is where its token 0 is: an element of x, or a word of the codes, whose row is `row`. With
    HAS_INDEX the codes of row r are those of row index[r].
    """
    if SOURCE == NVFP4:
        per_row = (columns + 15) // 16
        if HAS_INDEX:
            row = tl.load(index_ptr + row + i, mask=mask, other=0).to(tl.int64)
            word = load_nvfp4(codes_ptr, row * (columns // 8) + column // 8, mask)
            row -= i
        else:
            word = load_nvfp4(codes_ptr, first + i * (columns // 8), mask)
        if SCALE_ROWS == 1:
            at = (row * per_row + column // 16) + i * per_row
        else:
            at = ((row + i) // SCALE_ROWS) * per_row + column // 16
        sf = load_e4m3(scales_ptr, at, mask, ASM)
        s_dec = tl.load(sdec_ptr + row + i, mask=mask, other=0.0) if SDEC_ROWS else tl.load(sdec_ptr)
        # Codes decode 2^126 too small; the scale takes 2^118 of it and S_dec 2^8: no overflow, one rounding.
        return (word,), sf * 2.0**118, s_dec * 256.0
    else:
        return load_raw(x_ptr, first + i * row_stride, mask, SOURCE == BF16), 0.0, 0.0


@triton.jit
def source_magnitudes(raw, sf, s_dec, SOURCE: tl.constexpr):
    """Eight magnitudes, FP32."""
    if SOURCE == NVFP4:
        out = ()
        for j in tl.static_range(8):
            field = (raw[0] << (22 - 4 * j)) if j < 6 else (raw[0] >> (4 * j - 22))
            out = out + ((value(field & 0x01C00000) * sf) * s_dec,)
        return out
    else:
        return magnitudes(raw, SOURCE == BF16)


@triton.jit
def source_floats(raw, sf, s_dec, SOURCE: tl.constexpr):
    """Eight signed values, FP32."""
    if SOURCE == NVFP4:
        a = source_magnitudes(raw, sf, s_dec, SOURCE)
        out = ()
        for j in tl.static_range(8):
            out = out + (value(bits(a[j]) | ((raw[0] << (28 - 4 * j)) & 0x80000000)),)
        return out
    else:
        return floats(raw, SOURCE == BF16)


@triton.jit
def tile_maxima(raws, sfs, sdecs, SOURCE: tl.constexpr, ASM: tl.constexpr):
    """Bits of the largest magnitude of each of eight features over a thread's eight tokens; NaN above Inf."""
    out = ()
    if SOURCE == BF16:
        for k in tl.static_range(4):
            m = raws[0][k] & 0x7FFF7FFF
            for i in tl.static_range(1, 8):
                m = max_pairs(m, raws[i][k] & 0x7FFF7FFF, ASM)
            out = out + (m << 16, m & 0x7FFF0000)
    elif SOURCE == FP32:
        for j in tl.static_range(8):
            m = bits(raws[0][j]) & 0x7FFFFFFF
            for i in tl.static_range(1, 8):
                m = umax(m, bits(raws[i][j]) & 0x7FFFFFFF)
            out = out + (m,)
    else:
        most = source_magnitudes(raws[0], sfs[0], sdecs[0], SOURCE)
        for i in tl.static_range(1, 8):
            a = source_magnitudes(raws[i], sfs[i], sdecs[i], SOURCE)
            larger = ()
            for j in tl.static_range(8):
                larger = larger + (tl.maximum(most[j], a[j], propagate_nan=tl.PropagateNan.ALL),)
            most = larger
        for j in tl.static_range(8):
            out = out + (bits(most[j]) & 0x7FFFFFFF,)
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
