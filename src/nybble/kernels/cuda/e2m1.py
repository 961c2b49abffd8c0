"""Rounding to E2M1 and back, on registers: eight neighbouring elements are eight tensors.

Of a magnitude a the index is g(a) = min(2a, a + 2, a/2 + 4, 7) rounded to an integer: its pieces have the
steps 1/2, 1 and 2 of the format. An FP32 addition to 2^23 rounds to integers, ties to even, so rounding to
nearest is three additions and a minimum of their bits (rounding is monotone: the minimum may come after it).
Stochastic: an addition to 2^6, rounded towards zero, leaves g with 17 fraction bits; 2r + 1 is added to them.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits, draw_of, fma_rz, scaled_magnitude, value

# What rounded magnitudes hold beside their index, and what sums of eight of them times 16^j do.
STOCHASTIC_ZERO = tl.constexpr(0x3F7FFFF9)  # 1 - 7 * 2^-24: index 7 is 1.0, where additions can saturate
NEAREST_SUM = tl.constexpr(0x4B000000 * 0x11111111 & 0xFFFFFFFF)
STOCHASTIC_SUM = tl.constexpr(0x3F7FFFF9 * 0x11111111 & 0xFFFFFFFF)


@triton.jit
def e2m1_nearest(a):
    """uint32 whose low three bits are the index, the rest 0x4B000000; a >= 0 or NaN (index 7)."""
    halves = bits(tl.fma(a, 2.0, 8388608.0)).to(tl.int32)
    ones = bits(a + 8388610.0).to(tl.int32)
    twos = bits(tl.fma(a, 0.5, 8388612.0)).to(tl.int32)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x4B000007)).to(tl.uint32)


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
