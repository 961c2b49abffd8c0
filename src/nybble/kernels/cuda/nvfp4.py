"""NVFP4 codes and their block scales to values, eight neighbouring codes at a time.

On Hopper a code becomes an E4M3 byte by moving its bits, E4M3 becomes FP16 in pairs, and code times scale is
exact in FP16: six bits, from 2^-10 to 2688.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.e4m3 import e4m3_value
from nybble.kernels.cuda.elements import value


@triton.jit
def load_nvfp4(codes_ptr, word, mask):
    """Eight E2M1 codes as a uint32."""
    return tl.load(codes_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def load_e4m3(scales_ptr, offset, mask, ASM: tl.constexpr):
    """FP32 values of E4M3 bytes."""
    byte = tl.load(scales_ptr + offset, mask=mask, other=0).to(tl.uint32)
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 e, f, z;
            .reg .b32 h;
            cvt.u16.u32 e, $1;
            cvt.rn.f16x2.e4m3x2 h, e;
            mov.b32 {f, z}, h;
            cvt.f32.f16 $0, f;
            }""",
            "=f,r",
            [byte],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return e4m3_value(byte)


@triton.jit
def load_factor(scales_ptr, offset, mask, ASM: tl.constexpr):
    """Block scales as `nvfp4_values` takes them."""
    return nvfp4_factor(tl.load(scales_ptr + offset, mask=mask, other=0).to(tl.uint32), ASM)


@triton.jit
def nvfp4_factor(byte, ASM: tl.constexpr):
    """The same of their bytes (uint32): FP16 pairs, 64 times as large, or FP32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 e, z;
            .reg .b32 h, k;
            mov.b32 k, 0x54005400;
            mad.lo.u32 h, $1, 256, $1;
            mov.b32 {e, z}, h;
            cvt.rn.f16x2.e4m3x2 h, e;
            mul.rn.f16x2 $0, h, k;
            }""",
            "=r,r",
            [byte],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return e4m3_value(byte)


SIGNED_BYTES = tl.constexpr("""
            shl.b32 e, $8, 2;
            shl.b32 t, $8, 4;
            and.b32 e, e, 0x1C1C1C1C;
            lop3.b32 e, t, 0x80808080, e, 0xEA;
            shr.u32 o, $8, 2;
            and.b32 o, o, 0x1C1C1C1C;
            lop3.b32 o, $8, 0x80808080, o, 0xEA;""")
UNSIGNED_BYTES = tl.constexpr("""
            shl.b32 e, $8, 2;
            and.b32 e, e, 0x1C1C1C1C;
            shr.u32 o, $8, 2;
            and.b32 o, o, 0x1C1C1C1C;""")
# e: the bytes of the even elements, o: of the odd ones, 2^6 too small.
DECODE = tl.constexpr("""
            cvt.rn.f16x2.e4m3x2 p, a;
            cvt.rn.f16x2.e4m3x2 q, b;
            mov.b32 {a, b}, o;
            cvt.rn.f16x2.e4m3x2 r, a;
            cvt.rn.f16x2.e4m3x2 s, b;
            mul.rn.f16x2 p, p, $9;
            mul.rn.f16x2 q, q, $9;
            mul.rn.f16x2 r, r, $9;
            mul.rn.f16x2 s, s, $9;
            mov.b32 {a, b}, p;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $2, b;
            mov.b32 {a, b}, r;
            cvt.f32.f16 $1, a;
            cvt.f32.f16 $3, b;
            mov.b32 {a, b}, q;
            cvt.f32.f16 $4, a;
            cvt.f32.f16 $6, b;
            mov.b32 {a, b}, s;
            cvt.f32.f16 $5, a;
            cvt.f32.f16 $7, b;
            }""")


@triton.jit
def nvfp4_values(word, factor, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Eight codes, or their magnitudes, times the scale that `load_factor` gave: FP32, exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 e, o, t, p, q, r, s; .reg .b16 a, b;"
            + (SIGNED_BYTES if SIGNED else UNSIGNED_BYTES)
            + "mov.b32 {a, b}, e;"
            + DECODE,
            "=f,=f,=f,=f,=f,=f,=f,=f,r,r",
            [word, factor],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        out = ()
        for j in tl.static_range(8):
            field = (word << (22 - 4 * j)) if j < 6 else (word >> (4 * j - 22))
            field &= 0x01C00000
            if SIGNED:
                field |= (word << (28 - 4 * j)) & 0x80000000
            out = out + ((value(field) * 2.0**126) * factor,)
        return out
