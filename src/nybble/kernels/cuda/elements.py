"""FP32 registers and their bits: what rounding to each element needs."""
# mypy: ignore-errors
# ruff: noqa: RET505 -- Triton wants an else after a return

import triton
import triton.language as tl

SIGN = tl.constexpr(0x80000000)


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
def with_sign(magnitude, x):
    """magnitude >= 0 with the sign of x."""
    return value(bits(magnitude) | (bits(x) & SIGN))


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
def draw_of(w, HIGH: tl.constexpr):
    """The high or the low draw of a word."""
    return w >> 16 if HIGH else w & 0xFFFF


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
def top_halves(a, b, ASM: tl.constexpr):
    """The upper halves of two words, a's low."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (a >> 16) | (b & 0xFFFF0000)
