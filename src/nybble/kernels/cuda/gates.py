"""SwiGLU, plain and soft-capped, in FP32 on registers: h = f(gate) * g(up) from BF16, and its derivative.

    plain        h = (gate * s) * up                           s = sigmoid(gate)
    soft-capped  h = ((a * tanh(gate / a)) * s) * (b * tanh(up / b))

tanh follows CUDA's own: a polynomial below 0.6, exponentials above. All err by a few units in the last place
of FP32; divisions and exponentials are the hardware's own, without what they take to be right for subnormals.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import bf16_pair, floats, load_raw, times


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2^x, to two units in the last place; 0 for what is subnormal, on Hopper."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def inverse(x, ASM: tl.constexpr):
    """1 / x, to a unit in the last place; 0 for what is subnormal, on Hopper."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def tanh(x, ASM: tl.constexpr):
    """Hyperbolic tangent, FP32."""
    x2 = x * x
    p = tl.fma(x2, 1.57394830e-2, -5.23039624e-2)
    p = tl.fma(p, x2, 0.133152977)
    p = tl.fma(p, x2, -0.333327681)
    # e^2x overflows to 1 and vanishes to -1.
    big = tl.fma(inverse(exp2(x * 2.8853900817779268, ASM) + 1.0, ASM), -2.0, 1.0)
    return tl.where(tl.abs(x) < 0.6, tl.fma(p * x2, x, x), big)  # NaN takes the second


@triton.jit
def sigmoid(x, ASM: tl.constexpr):
    """1 / (1 + exp(-x)), FP32."""
    return inverse(exp2(x * -1.4426950408889634, ASM) + 1.0, ASM)


@triton.jit
def swiglu(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, ASM: tl.constexpr):
    """h of one element; caps of 0 are none."""
    if GATE_CAP > 0.0:
        left = tanh(gate * (1.0 / GATE_CAP), ASM) * sigmoid(gate, ASM)
        return (left * tanh(up * (1.0 / UP_CAP), ASM)) * (GATE_CAP * UP_CAP)
    else:
        return (gate * sigmoid(gate, ASM)) * up


@triton.jit
def swiglu_backward(gate, up, dh, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, ASM: tl.constexpr):
    """Gradients at gate and up for dh at h."""
    s = sigmoid(gate, ASM)
    if GATE_CAP > 0.0:
        tg = tanh(gate * (1.0 / GATE_CAP), ASM)
        tu = tanh(up * (1.0 / UP_CAP), ASM)
        left = tg * s
        # With l = tanh(g / a) s: dl/dg = s (1 - tanh^2) / a + l (1 - s), and a b l tanh(u / b) is h.
        slope = tl.fma(tl.fma(-left, tg, s), 1.0 / GATE_CAP, tl.fma(-left, s, left))
        return ((slope * tu) * dh) * (GATE_CAP * UP_CAP), (tl.fma(-left * tu, tu, left) * dh) * GATE_CAP
    else:
        y = gate * s
        return (tl.fma(-y, s, s + y) * up) * dh, y * dh


@triton.jit
def scaled_pairs(raw, factor, HAS_FACTOR: tl.constexpr, ASM: tl.constexpr):
    """Eight FP32 of BF16 pairs, times a factor and rounded to BF16 again if there is one."""
    return floats(times(raw, factor, True, ASM) if HAS_FACTOR else raw, True)


@triton.jit
def load_gated(
    x_ptr,
    at,
    half,
    mask,
    factor,
    HAS_FACTOR: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """h of eight elements as BF16 pairs: gate is at `at`, up `half` elements behind it."""
    gate = scaled_pairs(load_raw(x_ptr, at, mask, True), factor, HAS_FACTOR, ASM)
    up = scaled_pairs(load_raw(x_ptr, at + half, mask, True), factor, HAS_FACTOR, ASM)
    h = ()
    for j in tl.static_range(8):
        h = h + (swiglu(gate[j], up[j], GATE_CAP, UP_CAP, ASM),)
    out = ()
    for k in tl.static_range(4):
        out = out + (bf16_pair(h[2 * k], h[2 * k + 1], ASM),)
    return out
