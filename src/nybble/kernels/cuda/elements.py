"""Rounding to E2M1 and E4M3 and back, on tuples of registers: eight neighbouring elements are eight tensors.

E2M1, magnitude a: the index is g(a) = min(2a, a + 2, a/2 + 4, 7) rounded to an integer: its pieces have the
steps 1/2, 1 and 2 of the format. An FP32 addition to 2^23 rounds to integers, ties to even, so rounding to
nearest is three additions and a minimum of their bits (rounding is monotone: the minimum may come after it).
Stochastic: an addition to 2^6, rounded towards zero, leaves g with 17 fraction bits; 2r + 1 is added to them.
E4M3 stochastic: the FP32 bits of a have 20 bits to drop where a >= 2^-6; below, those of (a + 2^-6) / 2 have
the step of the subnormals, and the larger of the two patterns is the right one.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

SIGN = tl.constexpr(0x80000000)
# What rounded E2M1 magnitudes hold beside their index, and what sums of eight of them times 16^j do.
STOCHASTIC_ZERO = tl.constexpr(
    0x3F7FFFF9
)  # 1 - 7 * 2^-24, so that index 7 is 1.0, where additions can saturate
NEAREST_SUM = tl.constexpr(0x4B000000 * 0x11111111 & 0xFFFFFFFF)
STOCHASTIC_SUM = tl.constexpr(0x3F7FFFF9 * 0x11111111 & 0xFFFFFFFF)


@triton.jit
def bits(x):
    """FP32 to uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def value(b):
    """uint32 to FP32."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def scaled_magnitude(x, m, ASM: tl.constexpr):
    """|x| * m, whose absolute value Hopper takes in the product: Triton would mask bits first."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }",
            "=f,f,f",
            [x, m],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.abs(x) * m


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
def draw_of(w, HIGH: tl.constexpr):
    """The high or the low draw of a word."""
    return w >> 16 if HIGH else w & 0xFFFF


@triton.jit
def e2m1_stochastic(a, w, HIGH: tl.constexpr, ASM: tl.constexpr):
    """uint32 STOCHASTIC_ZERO plus the index, by a draw of word w. NaN: anything."""
    # t = 64 + g + 2^-17 in units of 2^-7; with the draw 64 + g + (2r + 1) / 2^17, then the floor.
    if ASM:
        unit = tl.full(w.shape, 0x200 if HIGH else 2, tl.uint32)
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 halves, ones, twos, s;
            .reg .b32 h, o, w;
            fma.rz.f32 halves, $1, 0f3C800000, 0f3F000001;
            fma.rz.f32 ones, $1, 0f3C000000, 0f3F040001;
            fma.rz.sat.f32 twos, $1, 0f3B800000, 0f3F080001;
            mov.b32 h, halves;
            mov.b32 o, ones;
            mov.b32 w, twos;
            min.s32 h, h, o;
            min.s32 h, h, w;
            dp2a.lo.u32.u32 h, $2, $3, h;
            mov.b32 s, h;
            fma.rz.sat.f32 s, s, 0f37000000, 0f3F7FFFB9;
            mov.b32 $0, s;
            }""",
            "=r,f,r,r",
            [a, w, unit],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    halves = bits(fma_rz(a, 2.0, 64.0 + 2.0**-17, ASM)).to(tl.int32)
    ones = bits(fma_rz(a, 1.0, 66.0 + 2.0**-17, ASM)).to(tl.int32)
    twos = bits(fma_rz(a, 0.5, 68.0 + 2.0**-17, ASM)).to(tl.int32)
    g = tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x428E0000)).to(tl.uint32)
    return (((g + draw_of(w, HIGH) * 2) >> 17) & 15) + STOCHASTIC_ZERO


@triton.jit
def e2m1_index(t, STOCHASTIC: tl.constexpr):
    """uint32 whose low three bits are the index of a rounded magnitude, and bits 3 to 22 are 0."""
    return t + (0x3F800000 - STOCHASTIC_ZERO) if STOCHASTIC else t


@triton.jit
def e2m1_rounded(a, words, j: tl.constexpr, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """A magnitude rounded by `e2m1_nearest`, or by `e2m1_stochastic` with the draw of element j of eight."""
    if STOCHASTIC:
        return e2m1_stochastic(a, words[j // 2], j % 2 == 1, ASM)
    else:
        return e2m1_nearest(a)


@triton.jit
def e2m1_indices(x, m, words, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """Eight rounded magnitudes |x_j| * m."""
    out = ()
    for j in tl.static_range(8):
        out = out + (e2m1_rounded(scaled_magnitude(x[j], m, ASM), words, j, STOCHASTIC, ASM),)
    return out


@triton.jit
def e2m1_word(t, signs, STOCHASTIC: tl.constexpr):
    """Eight codes in one uint32, element 0 lowest, of `e2m1_indices` and `registers.sign_nibbles`."""
    acc = t[7]
    for k in tl.static_range(7):
        acc = acc * 16 + t[6 - k]
    return (acc - (STOCHASTIC_SUM if STOCHASTIC else NEAREST_SUM)) | signs


@triton.jit
def e2m1_magnitude(t, STOCHASTIC: tl.constexpr):
    """The FP32 value of a rounded magnitude: an index at bit 22 is a float 2^-126 times too small."""
    return value(e2m1_index(t, STOCHASTIC) << 22) * 2.0**126


@triton.jit
def e2m1_pairs(t, raw, scale, STOCHASTIC: tl.constexpr):
    """What `e2m1_magnitude` times scale (E4M3) gives with the signs of BF16 pairs `raw`, as BF16 pairs.

    An index at bit 6 is a BF16 number 2^-126 too small. Products are exact, in Hopper's pairs of BF16.
    """
    ZERO: tl.constexpr = STOCHASTIC_ZERO if STOCHASTIC else 0x4B000000
    clear = tl.full(t[0].shape, -(ZERO * 64 + (ZERO << 22)) & 0xFFFFFFFF, tl.uint32)
    out = ()
    for k in tl.static_range(4):
        indices = t[2 * k + 1] * (1 << 22) + (t[2 * k] * 64 + clear)
        out = out + (
            tl.inline_asm_elementwise(
                """{
                .reg .b32 f, k;
                .reg .f32 s;
                mul.rn.f32 s, $3, 0f43000000;
                cvt.rn.bf16x2.f32 f, s, s;
                mov.b32 k, 0x7B007B00;
                mul.rn.bf16x2 k, k, $1;
                mul.rn.bf16x2 k, k, f;
                lop3.b32 $0, $2, 0x80008000, k, 0xEA;
                }""",
                "=r,r,r,f",
                [indices, raw[k], scale],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            ),
        )
    return out


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
