"""SwiGLU, plain and soft-capped, in FP32 on registers: h = f(gate) * g(up) from BF16, and its derivative.

    plain        h = (gate * s) * up                           s = sigmoid(gate)
    soft-capped  h = ((a * tanh(gate / a)) * s) * (b * tanh(up / b))

tanh follows CUDA's own: a polynomial below 0.6, exponentials above; both err by about one unit in the last
place of FP32.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import bf16_pair, floats, load_raw, times


@triton.jit
def tanh(x):
    """Hyperbolic tangent, FP32."""
    a = tl.abs(x)
    big = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    big = tl.where(x < 0.0, -big, big)
    x2 = x * x
    p = tl.fma(x2, 1.57394830e-2, -5.23039624e-2)
    p = tl.fma(p, x2, 0.133152977)
    p = tl.fma(p, x2, -0.333327681)
    return tl.where(a < 0.6, tl.fma(p * x2, x, x), big)  # NaN takes the second


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), FP32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    """h of one element; caps of 0 are none."""
    if GATE_CAP > 0.0:
        capped = GATE_CAP * tanh(gate * (1.0 / GATE_CAP))
        return (capped * sigmoid(gate)) * (UP_CAP * tanh(up * (1.0 / UP_CAP)))
    else:
        return (gate * sigmoid(gate)) * up


@triton.jit
def swiglu_backward(gate, up, dh, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    """Gradients at gate and up for dh at h."""
    s = sigmoid(gate)
    if GATE_CAP > 0.0:
        tg = tanh(gate * (1.0 / GATE_CAP))
        tu = tanh(up * (1.0 / UP_CAP))
        left = tg * s
        # With l = tanh(g / a) s: dl/dg = s (1 - tanh^2) / a + l (1 - s), and a b l tanh(u / b) is h.
        slope = (s - left * tg) * (1.0 / GATE_CAP) + (left - left * s)
        return ((slope * tu) * dh) * (GATE_CAP * UP_CAP), ((left - (left * tu) * tu) * dh) * GATE_CAP
    else:
        y = gate * s
        return ((s + (y - y * s)) * up) * dh, y * dh


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
        h = h + (swiglu(gate[j], up[j], GATE_CAP, UP_CAP),)
    out = ()
    for k in tl.static_range(4):
        out = out + (bf16_pair(h[2 * k], h[2 * k + 1], ASM),)
    return out
