"""Rounding to E2M1 and E4M3 and back, on tuples of registers: eight neighbouring elements are eight tensors.

E2M1, magnitude a: the index is the largest integer function g(a) = min(2a, a + 2, a/2 + 4, 7) rounded: its three pieces
have the steps 1/2, 1 and 2 of the format. An FP32 addition to 2^23 rounds to integers, ties to even, so rounding to
nearest is three additions and a minimum of their bits. Rounding is monotone, so the minimum may come after it.
Stochastic: an addition to 2^6, rounded towards zero, leaves g with 17 fraction bits, to which 2r + 1 is added.
E4M3 stochastic: the FP32 bits of a have 20 bits to drop where a >= 2^-6; below, those of (a + 2^-6) / 2 have the step of the
subnormals, and the larger of the two patterns is the right one.
"""

import triton
import triton.language as tl

SIGN = tl.constexpr(0x80000000)
# What the Horner sums of packed indices hold beside the indices: sum over j < 8 of bias * 16^j, modulo 2^32.
NEAREST_BIAS = tl.constexpr(0x4B000000 * 0x11111111 & 0xFFFFFFFF)
STOCHASTIC_BIAS = tl.constexpr((0x42800000 >> 17) * 0x11111111 & 0xFFFFFFFF)


@triton.jit
def bits(x):
    """FP32 to uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def value(b):
    """uint32 to FP32."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def fma_rz(a, factor: tl.constexpr, addend: tl.constexpr, ASM: tl.constexpr):
    """a * factor + addend rounded towards zero; factor is a power of two, a >= 0, addend > 0."""
    if ASM:
        f = tl.full(a.shape, factor, tl.float32)
        c = tl.full(a.shape, addend, tl.float32)
        return tl.inline_asm_elementwise(
            "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, f, c], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        p = a * factor
        t = p + addend
        return tl.where(t - addend > p, value(bits(t) - 1), t)


@triton.jit
def e2m1_nearest(a):
    """uint32 whose low three bits are the index, the rest 0x4B000000; a >= 0 or NaN (index 7)."""
    halves = bits(tl.fma(a, 2.0, 8388608.0)).to(tl.int32)
    ones = bits(a + 8388610.0).to(tl.int32)
    twos = bits(tl.fma(a, 0.5, 8388612.0)).to(tl.int32)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x4B000007)).to(tl.uint32)


@triton.jit
def e2m1_stochastic(a, r2, ASM: tl.constexpr):
    """uint32 whose bits 17 to 19 are the index, above them those of 0x42800000; r2 is twice the draw."""
    halves = bits(fma_rz(a, 2.0, 64.0 + 2.0**-17, ASM)).to(tl.int32)
    ones = bits(fma_rz(a, 1.0, 66.0 + 2.0**-17, ASM)).to(tl.int32)
    twos = bits(fma_rz(a, 0.5, 68.0 + 2.0**-17, ASM)).to(tl.int32)
    g = tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x428E0000))
    return g.to(tl.uint32) + r2


@triton.jit
def twice_low(w):
    """Twice the low draw of a word."""
    return (w & 0xFFFF) * 2


@triton.jit
def twice_high(w):
    """Twice the high draw of a word."""
    return (w >> 16) * 2


@triton.jit
def e2m1_indices(a, m, words, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """Eight rounded magnitudes a_j * m, biased as `e2m1_nearest` or `e2m1_stochastic` leaves them."""
    out = ()
    for j in tl.static_range(8):
        if STOCHASTIC:
            r2 = twice_low(words[j // 2]) if j % 2 == 0 else twice_high(words[j // 2])
            out = out + (e2m1_stochastic(a[j] * m, r2, ASM),)
        else:
            out = out + (e2m1_nearest(a[j] * m),)
    return out


@triton.jit
def e2m1_word(t, signs, STOCHASTIC: tl.constexpr):
    """Eight codes in one uint32, element 0 in the low nibble, of `e2m1_indices` and `registers.sign_nibbles`."""
    acc = (t[7] >> 17) if STOCHASTIC else t[7]
    for k in tl.static_range(7):
        acc = acc * 16 + ((t[6 - k] >> 17) if STOCHASTIC else t[6 - k])
    return (acc - (STOCHASTIC_BIAS if STOCHASTIC else NEAREST_BIAS)) | signs


@triton.jit
def e2m1_magnitude(t, STOCHASTIC: tl.constexpr):
    """The FP32 value of a rounded magnitude: an index at bit 22 is a float 2^-126 times too small."""
    if STOCHASTIC:
        return value((t << 5) & 0x01C00000) * 2.0**126
    else:
        return value(t << 22) * 2.0**126


@triton.jit
def with_sign(magnitude, x):
    """magnitude >= 0 with the sign of x."""
    return value(bits(magnitude) | (bits(x) & SIGN))


@triton.jit
def e4m3_word_nearest(x0, x1, x2, x3, ASM: tl.constexpr):
    """Four FP32 values as E4M3 bytes in a uint32, saturating, x0 lowest. NaN gives 0x7F."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            e4m3_byte_nearest(x0)
            | (e4m3_byte_nearest(x1) << 8)
            | (e4m3_byte_nearest(x2) << 16)
            | (e4m3_byte_nearest(x3) << 24)
        )


@triton.jit
def e4m3_byte_nearest(x):
    """One saturated E4M3 byte in a uint32, in integer arithmetic."""
    b = bits(x) & 0x7FFFFFFF
    nan = b > 0x7F800000
    b = tl.minimum(b.to(tl.int32), 0x43E00000).to(tl.uint32)
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960
    # Added to 1.5 * 2^14, whose unit is 2^-9: the subnormals' step.
    subnormal = bits(value(b) + 24576.0) - 0x46C00000
    index = tl.where(b < 0x3C800000, subnormal, normal)
    return tl.where(nan, 0x7F, index | ((bits(x) >> 24) & 0x80))


@triton.jit
def e4m3_stochastic(a, r16, ASM: tl.constexpr, CLAMP: tl.constexpr):
    """uint32 whose bits 20 to 27 hold the E4M3 magnitude byte plus 960; r16 is 16 r + 8, a in [0, 448] or clamped so."""
    p = tl.maximum(bits(a).to(tl.int32), bits(fma_rz(a, 0.5, 2.0**-7, ASM)).to(tl.int32))
    if CLAMP:
        p = tl.minimum(p, 0x43E00000)
    return p.to(tl.uint32) + r16


@triton.jit
def sixteen_low(w):
    """16 r + 8 of the low draw of a word."""
    return ((w << 4) & 0xFFFF0) | 8


@triton.jit
def sixteen_high(w):
    """16 r + 8 of the high draw of a word."""
    return ((w >> 12) & 0xFFFF0) | 8


@triton.jit
def top_bytes(a, b, c, d, ASM: tl.constexpr):
    """The highest bytes of four uint32 in one, a's lowest."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 lo, hi;
            prmt.b32 lo, $1, $2, 0x7373;
            prmt.b32 hi, $3, $4, 0x7373;
            prmt.b32 $0, lo, hi, 0x5410;
            }""",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return (a >> 24) | ((b >> 24) << 8) | ((c >> 24) << 16) | (d & 0xFF000000)


@triton.jit
def e4m3_word_stochastic(s0, s1, s2, s3, signs, ASM: tl.constexpr):
    """Four results of `e4m3_stochastic` as bytes in a uint32; `signs` holds their sign bits at 7, 15, 23, 31."""
    magnitudes = top_bytes(
        s0 * 16 + 0x40000000, s1 * 16 + 0x40000000, s2 * 16 + 0x40000000, s3 * 16 + 0x40000000, ASM
    )
    return magnitudes | (signs & 0x80808080)


@triton.jit
def e4m3_values(word, ASM: tl.constexpr):
    """The four FP32 values of a word of E4M3 bytes."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi, a, b, c, d;
            .reg .b32 l, h;
            mov.b32 {lo, hi}, $4;
            cvt.rn.f16x2.e4m3x2 l, lo;
            cvt.rn.f16x2.e4m3x2 h, hi;
            mov.b32 {a, b}, l;
            mov.b32 {c, d}, h;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return e4m3_value(word), e4m3_value(word >> 8), e4m3_value(word >> 16), e4m3_value(word >> 24)


@triton.jit
def e4m3_value(byte):
    """The FP32 value of the lowest byte of a uint32."""
    m = value((byte & 0x7F) << 20) * 2.0**120
    m = tl.where((byte & 0x7F) == 0x7F, float("nan"), m)
    return value(bits(m) | ((byte & 0x80) << 24))
