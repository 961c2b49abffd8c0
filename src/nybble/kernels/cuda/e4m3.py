"""Rounding to E4M3 and back, on registers: four bytes a word.

Stochastic: the FP32 bits of a magnitude a have 20 bits to drop where a >= 2^-6; below, those of
(a + 2^-6) / 2 have the step of the subnormals, and the larger of the two patterns is the right one.
"""
# mypy: ignore-errors
# ruff: noqa: RET505 -- Triton wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits, draw_of, fma_rz, value


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
def e4m3_stochastic(a, w, HIGH: tl.constexpr, ASM: tl.constexpr, CLAMP: tl.constexpr):
    """uint32 whose bits 20 to 27 are the E4M3 magnitude, by a draw of word w; a <= 448 or clamped so."""
    # On top of the bits: 8, half a unit of the draws, and 8 exponents, which bring the byte's bias to 256.
    p = tl.maximum(
        (bits(a) + 0x04000008).to(tl.int32), bits(fma_rz(a, 128.0, 2.0 + 2.0**-19, ASM)).to(tl.int32)
    )
    if CLAMP:
        p = tl.minimum(p, 0x47E00008)
    p = p.to(tl.uint32)
    if ASM:
        # The dot product of the word's halves with (16, 0) or (0, 16).
        unit = tl.full(w.shape, 0x1000 if HIGH else 16, tl.uint32)
        return tl.inline_asm_elementwise(
            "dp2a.lo.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [w, unit, p], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return p + draw_of(w, HIGH) * 16


@triton.jit
def e4m3_rounded(a, words, j: tl.constexpr, ASM: tl.constexpr, CLAMP: tl.constexpr):
    """`e4m3_stochastic` with the draw of element j of eight."""
    return e4m3_stochastic(a, words[j // 2], j % 2 == 1, ASM, CLAMP)


@triton.jit
def e4m3_word_stochastic(s0, s1, s2, s3, signs, ASM: tl.constexpr):
    """Four results of `e4m3_stochastic` as bytes; `signs` has their signs at bits 7, 15, 23, 31."""
    if ASM:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b32 lo, hi;
            prmt.b32 lo, $1, $2, 0x7632;
            prmt.b32 hi, $3, $4, 0x7632;
            shl.b32 lo, lo, 4;
            shl.b32 hi, hi, 4;
            prmt.b32 $0, lo, hi, 0x7531;
            }""",
            "=r,r,r,r,r",
            [s0, s1, s2, s3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        word = (s0 >> 20 & 0xFF) | (s1 >> 12 & 0xFF00) | (s2 >> 4 & 0xFF0000) | (s3 << 4 & 0xFF000000)
    return word | (signs & 0x80808080)


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
