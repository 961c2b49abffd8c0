"""Maxima and minima of three words and of halves of words, which Hopper has instructions for."""
# mypy: ignore-errors
# ruff: noqa: RET505 -- Triton wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import umax


@triton.jit
def umin(a, b):
    """Minimum of two uint32 below 2^31."""
    return tl.minimum(a.to(tl.int32), b.to(tl.int32)).to(tl.uint32)


@triton.jit
def max3(a, b, c, ASM: tl.constexpr):
    """The largest of three uint32 below 2^31, in one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return umax(umax(a, b), c)


@triton.jit
def min3(a, b, c, ASM: tl.constexpr):
    """The least of three uint32 below 2^31, in one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 t; min.s32 t, $1, $2; min.s32 $0, t, $3; }",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return umin(umin(a, b), c)


@triton.jit
def min8(t, ASM: tl.constexpr):
    """The least of eight."""
    return umin(min3(min3(t[0], t[1], t[2], ASM), min3(t[3], t[4], t[5], ASM), t[6], ASM), t[7])


@triton.jit
def max_halves(a, b, ASM: tl.constexpr):
    """The larger of each of two halves of words, unsigned."""
    if ASM:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def min_halves(a, b, ASM: tl.constexpr):
    """The lesser of each of two halves of words, unsigned."""
    if ASM:
        return tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | (tl.minimum(a >> 16, b >> 16) << 16)
