"""Blocks of NVFP4 codes that are re-rounded to MXFP8 with few instructions, as nearly all can be.

A block is usual if its scale is from 2^-103 to 2^119 and no result in its tile is subnormal in E4M3. A
row's least code, if it is not zero, is half of the row's scale, so few numbers tell. Then a result's bits
are those of its magnitude with the scale's exponent added, by an instruction that takes the maximum with
zero's bits too; the draw is added to them, and what is below E4M3's mantissa dropped. Magnitudes are
2^-14 of what they stand for here, as FP16 reads E2M1's bits in the place of its own.

A thread owns 8 tokens x 8 features, a warp a tile of 32 x 64.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import columns
from nybble.kernels.cuda.e4m3 import e4m3_value
from nybble.kernels.cuda.elements import bits, draw_of, top_halves, value
from nybble.kernels.cuda.extremes import max3, max_halves, min8, min_halves, umin
from nybble.kernels.cuda.nvfp4 import nvfp4_values
from nybble.kernels.cuda.registers import umax

LOWER = tl.constexpr(0.00390625 / 448.0)
"""Gives the amax of a block, 2^-14 of it, the exponent byte of the block's scale less LOWERED."""
LOWERED = tl.constexpr(22)


@triton.jit
def code_magnitudes(word, byte, ASM: tl.constexpr):
    """2^-14 of the magnitudes of eight codes times their scale, FP32, exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 h, p, q, r, s;
            .reg .b16 a, b, f, z;
            cvt.u16.u32 f, $9;
            cvt.rn.f16x2.e4m3x2 h, f;
            mov.b32 {f, z}, h;
            mov.b32 h, {f, f};
            shl.b32 p, $8, 9;
            shl.b32 q, $8, 5;
            shl.b32 r, $8, 1;
            shr.u32 s, $8, 3;
            and.b32 p, p, 0x0E000E00;
            and.b32 q, q, 0x0E000E00;
            and.b32 r, r, 0x0E000E00;
            and.b32 s, s, 0x0E000E00;
            mul.rn.f16x2 p, p, h;
            mul.rn.f16x2 q, q, h;
            mul.rn.f16x2 r, r, h;
            mul.rn.f16x2 s, s, h;
            mov.b32 {a, b}, p;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $4, b;
            mov.b32 {a, b}, q;
            cvt.f32.f16 $1, a;
            cvt.f32.f16 $5, b;
            mov.b32 {a, b}, r;
            cvt.f32.f16 $2, a;
            cvt.f32.f16 $6, b;
            mov.b32 {a, b}, s;
            cvt.f32.f16 $3, a;
            cvt.f32.f16 $7, b;
            }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,r,r",
            [word, byte],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return nvfp4_values(word, e4m3_value(byte) * 2.0**-14, False, ASM)


@triton.jit
def scale_pairs(x, ASM: tl.constexpr):
    """Of features 2k and 2k + 1, each eight tokens of `x`, the exponents of their blocks' scales.

    They are in halves of a word from bit 7 on; what is below them grows with the amax.
    """
    out = ()
    for k in tl.static_range(4):
        halves = ()
        for j in tl.static_range(2 * k, 2 * k + 2):
            m = max3(bits(x[j]), bits(x[8 + j]), bits(x[16 + j]), ASM)
            m = max3(m, bits(x[24 + j]), bits(x[32 + j]), ASM)
            m = max3(m, bits(x[40 + j]), bits(x[48 + j]), ASM)
            halves = halves + (bits(value(umax(m, bits(x[56 + j]))) * LOWER) + 0x7FFFFF,)
        out = out + (halves_over_lanes(top_halves(halves[0], halves[1], ASM), ASM),)
    return out


@triton.jit
def over_lanes(t):
    """Maximum of uint32 below 2^31 over the four lanes of a block's tokens, to each of them."""
    return columns.to_lanes(columns.over_lanes(t, 1, 4, 8), 1, 4, 8)


@triton.jit
def halves_over_lanes(t, ASM: tl.constexpr):
    """The same of each half."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            shfl.sync.bfly.b32 t, $1, 8, 31, -1;
            max.u16x2 u, $1, t;
            shfl.sync.bfly.b32 t, u, 16, 31, -1;
            max.u16x2 $0, u, t;
            }""",
            "=r,r",
            [t],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return over_lanes(t & 0xFFFF) | (over_lanes(t >> 16) << 16)


@triton.jit
def are_usual(pairs, scales, sdecs, SDEC_ROWS: tl.constexpr, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Whether a thread's eight blocks are usual, seen from its eight tokens: bytes of `scales`, and S_dec."""
    MOST: tl.constexpr = (134 if VALUES else 246) - LOWERED  # BF16 holds 2^7 times 2^120
    high = max_halves(max_halves(pairs[0], pairs[1], ASM), max_halves(pairs[2], pairs[3], ASM), ASM)
    low = min_halves(min_halves(pairs[0], pairs[1], ASM), min_halves(pairs[2], pairs[3], ASM), ASM)
    high = umax(high & 0xFFFF, high >> 16)
    low = umin(low & 0xFFFF, low >> 16)
    byte = min8(scales, ASM)
    s_dec = bits(sdecs[0])
    if SDEC_ROWS:
        each = ()
        for i in tl.static_range(8):
            each = each + (bits(sdecs[i]),)
        s_dec = min8(each, ASM)
    # An exponent of 1 may be that of any product below the normal ones. Half of
    # 2^(byte / 8 - 7) * S_dec is at least 2^-6 of any scale.
    least = (byte >> 3) + (s_dec >> 23)
    return (low >= 2 << 7) & (high < (MOST + 1) << 7) & (byte >= 8) & (least >= (high >> 7) + (LOWERED + 2))


@triton.jit
def shifts(pairs, ASM: tl.constexpr):
    """What is added to the bits of eight features' magnitudes: exponents, and 8, half a unit of the draws."""
    out = ()
    for k in tl.static_range(4):
        out = out + (shift(pairs[k] << 16, ASM), shift(pairs[k], ASM))
    return out


@triton.jit
def shift(t, ASM: tl.constexpr):
    """8, and the complement of the upper nine bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xFF800000, $2, 0xAE;",
            "=r,r,r",
            [t, tl.full(t.shape, 8, tl.uint32)],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return (t & 0xFF800000 ^ 0xFF800000) | 8


@triton.jit
def rounded(x, shift, words, j: tl.constexpr, ASM: tl.constexpr):
    """uint32 whose bits 20 to 26 are the E4M3 magnitude of x by its draw, bits 27 to 31 zero.

    `shift`: the exponent to be added to that of x, and 8, half a unit of the draws.
    """
    w = words[j // 2]
    if ASM:
        # In one piece, or the sum and the maximum do not become one instruction.
        return tl.inline_asm_elementwise(
            """{
            .reg .s32 p;
            mov.b32 p, $1;
            add.s32 p, p, $2;
            max.s32 p, p, 8;
            dp2a.lo.u32.u32 $0, $3, $4, p;
            }""",
            "=r,f,r,r,r",
            [x, shift, w, tl.full(w.shape, 0x1000 if j % 2 == 1 else 16, tl.uint32)],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        p = tl.maximum((bits(x) + shift).to(tl.int32), 8).to(tl.uint32)
        return p + draw_of(w, j % 2 == 1) * 16
