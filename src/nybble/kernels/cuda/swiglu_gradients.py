"""Gradients of a SwiGLU over the rows of experts.

Legend: see `expert_passes.py`. A thread has eight gates, and the eight values that they belong to.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.gates import scaled_pairs, swiglu_backward
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4, nvfp4_values
from nybble.kernels.cuda.registers import (
    floats,
    load_raw,
)
from nybble.kernels.cuda.stores import store_values


@triton.jit
def times_factor(v, factor, HAS_FACTOR: tl.constexpr):
    """Eight FP32 times a factor, if there is one."""
    out = v
    if HAS_FACTOR:
        out = ()
        for j in tl.static_range(8):
            out = out + (v[j] * factor,)
    return out


@triton.jit
def dot_of_codes(dots, g, word, sf, ASM: tl.constexpr):
    """`dots` plus the products of eight g with values of NVFP4 codes, without their outer scale."""
    h = nvfp4_values(word, sf, True, ASM)
    for j in tl.static_range(8):
        dots = tl.fma(g[j], h[j], dots)
    return dots


@triton.jit
def outer_scale(amax, OUTER_MAX: tl.constexpr):
    """S_dec of an outer amax, to the last place: of a sum that has no order."""
    return tl.maximum(amax, OUTER_MAX / rule.FLT_MAX) * (1.0 / OUTER_MAX)  # S_enc is at most FLT_MAX


@triton.jit
def gate_gradients(
    gate_raw,
    up_raw,
    g,
    factor,
    weight,
    HAS_FACTOR: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Eight gradients at gate and eight at up, FP32, from g before the routing weight."""
    gate = scaled_pairs(gate_raw, factor, HAS_FACTOR, ASM)
    up = scaled_pairs(up_raw, factor, HAS_FACTOR, ASM)
    dgate = ()
    dup = ()
    for j in tl.static_range(8):
        a, b = swiglu_backward(gate[j], up[j], g[j] * weight, GATE_CAP, UP_CAP, ASM)
        dgate = dgate + (a,)
        dup = dup + (b,)
    return dgate, dup


@triton.jit(do_not_specialize=["units", "groups", "scale_columns"])
def swiglu_backward_rows(
    x_ptr,  # gate and up: BF16 pairs [R, 2I]
    factor_ptr,  # of x
    g_ptr,  # BF16 pairs [R, I]: gradient at h before the routing weight
    g_factor_ptr,  # of g
    weights_ptr,  # FP32 by pair
    order_ptr,
    h_ptr,  # BF16 pairs [R, I], or int32 words of NVFP4 codes
    h_scales_ptr,
    h_amax_ptr,  # [R] or one
    d_ptr,  # BF16 pairs [R, 2I]
    dot_ptr,  # FP32 by pair: <g, h>
    ends_ptr,
    units,  # I / 8
    groups,
    scale_columns,
    OUTER_MAX: tl.constexpr,
    AMAX_ROWS: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_G_FACTOR: tl.constexpr,
    DOT: tl.constexpr,  # 0: none, 1: with h in BF16, 2: with h in codes
    D: tl.constexpr,  # whether the gradient at gate and up is wanted
    LOOPS: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Gradients at gate and up, and at the routing weights, of each row."""
    row = tl.program_id(0).to(tl.int64)
    inside = row < tl.load(ends_ptr + groups - 1)
    factor = tl.load(factor_ptr + row) if HAS_FACTOR else 1.0
    g_factor = tl.load(g_factor_ptr + row) if HAS_G_FACTOR else 1.0
    pair = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + pair)
    dots = tl.zeros((N,), tl.float32)
    for i in range(LOOPS):
        u = (i * N + tl.arange(0, N)).to(tl.int64)
        mask = (u < units) & inside
        g = floats(load_raw(g_ptr, (row * units + u) * 8, mask, True), True)
        g = times_factor(g, g_factor, HAS_G_FACTOR)
        if DOT == 1:
            h = floats(load_raw(h_ptr, (row * units + u) * 8, mask, True), True)
            for j in tl.static_range(8):
                dots += g[j] * h[j]
        if DOT == 2:
            sf = load_factor(h_scales_ptr, row * scale_columns + u // 2, mask, ASM)
            dots = dot_of_codes(dots, g, load_nvfp4(h_ptr, row * units + u, mask), sf, ASM)
        if D:
            at = row * units * 16 + u * 8
            half = units.to(tl.int64) * 8
            gate, up = load_raw(x_ptr, at, mask, True), load_raw(x_ptr, at + half, mask, True)
            dgate, dup = gate_gradients(gate, up, g, factor, weight, HAS_FACTOR, GATE_CAP, UP_CAP, ASM)
            store_values(d_ptr, at, dgate, u < units, True, ASM)
            store_values(d_ptr, at + half, dup, u < units, True, ASM)
    if DOT > 0:
        dot = tl.sum(dots)
        if DOT == 2:
            dot *= outer_scale(tl.load(h_amax_ptr + row * AMAX_ROWS), OUTER_MAX)
        tl.store(dot_ptr + pair, dot)
