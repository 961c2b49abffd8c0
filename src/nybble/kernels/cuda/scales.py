"""Block and outer scales in Triton, by the rules of `formats/encode.py`. Divisions are IEEE's."""
# mypy: ignore-errors
# ruff: noqa: RET505 -- Triton wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.e4m3 import e4m3_byte_nearest, e4m3_value
from nybble.kernels.cuda.elements import bits, value

FLT_MAX = tl.constexpr(3.4028234663852886e38)
INFINITE = tl.constexpr(0x7F800000)
E4M3 = tl.constexpr(0)
E8M0_UP = tl.constexpr(1)
E8M0_FLOOR = tl.constexpr(2)
FP32 = tl.constexpr(3)


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1 / x, correctly rounded."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def quick_reciprocal(x):
    """The same for x = 0, which gives NaN, and for normal x up to 2^125, by Hopper's own steps for those."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 r, e;
        rcp.approx.ftz.f32 r, $1;
        fma.rn.f32 e, $1, r, 0fBF800000;
        neg.f32 e, e;
        fma.rn.f32 $0, r, e, r;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def encode_scale(amax, OUTER_MAX: tl.constexpr):
    """S_enc of an outer amax."""
    s = tl.minimum(tl.div_rn(tl.full(amax.shape, OUTER_MAX, tl.float32), amax), FLT_MAX)
    return tl.where((amax == 0.0) | (s == 0.0), 1.0, s)


@triton.jit
def round_e4m3(x, ASM: tl.constexpr):
    """(byte, its FP32 value) of 0 <= x, saturating at 448."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 e, f, z;
            .reg .b32 h;
            .reg .f32 zero;
            mov.f32 zero, 0f00000000;
            cvt.rn.satfinite.e4m3x2.f32 e, zero, $2;
            cvt.u32.u16 $0, e;
            cvt.rn.f16x2.e4m3x2 h, e;
            mov.b32 {f, z}, h;
            cvt.f32.f16 $1, f;
            }""",
            "=r,=f,f",
            [x],
            dtype=(tl.uint32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        byte = e4m3_byte_nearest(x)
        return byte, e4m3_value(byte)


@triton.jit
def e4m3_multiplier(sf, s_dec, ASM: tl.constexpr):
    """What elements are multiplied by under an NVFP4 block scale of value sf."""
    return tl.minimum(reciprocal(sf * s_dec, ASM), FLT_MAX)


@triton.jit
def usual_multiplier(sf, s_dec):
    """The same on Hopper, of an outer amax between 2^-100 and 2^100."""
    return tl.minimum(quick_reciprocal(sf * s_dec), FLT_MAX)  # the minimum of NaN is the other


@triton.jit
def e8m0_byte(m, ELEMENT_MAX: tl.constexpr, SCALE: tl.constexpr):
    """E8M0 byte (uint32) of a block whose amax has the FP32 bits m (uint32); 255 for Inf and NaN."""
    if SCALE == E8M0_UP:
        # Up from any mantissa where b is normal; from more than a half where it is not, and 2 b - 2 is the
        # lesser, but for b = 0, where it wraps.
        finite = tl.minimum(m.to(tl.int32), INFINITE).to(tl.uint32)
        b = bits(value(finite) * (1.0 / ELEMENT_MAX))
        return tl.minimum(b + 0x7FFFFF, 2 * b - 2) >> 23
    else:
        exponent_of_max: tl.constexpr = 8 if ELEMENT_MAX == 448.0 else 2
        e = (m >> 23).to(tl.int32) - exponent_of_max
        byte = tl.maximum(e, 0).to(tl.uint32)
        return tl.where(m >= INFINITE, 255, byte).to(tl.uint32)


@triton.jit
def e8m0_multiplier(byte):
    """2^(127 - byte) of a byte that `e8m0_byte` gave, which is at most 252; anything for 255."""
    return value(((254 - byte) << 23).to(tl.uint32))


@triton.jit
def e8m0_value(byte):
    """2^(byte - 127), NaN for 255."""
    b = tl.where(byte == 0, 0x00400000, byte << 23)
    return value(tl.where(byte == 255, 0x7FC00000, b).to(tl.uint32))


@triton.jit
def fp32_multiplier(amax_b):
    """S of an FP8 block; its stored scale is 1 / S."""
    s = tl.minimum(tl.div_rn(tl.full(amax_b.shape, 448.0, tl.float32), amax_b), FLT_MAX)
    return tl.where(amax_b == 0.0, 1.0, s)
