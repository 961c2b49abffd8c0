"""Elementwise passes over the rows of experts: factors of rows, SwiGLU, the weighted sum.

Legend: T tokens, k experts a token, R = T * k rows sorted by expert; rows at or beyond ends[-1] belong to no
expert, hold anything, and count as zeros.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.gates import load_gated
from nybble.kernels.cuda.gather import lanes
from nybble.kernels.cuda.registers import floats, load_raw
from nybble.kernels.cuda.stores import store_values


@triton.jit(do_not_specialize=["rows", "groups"])
def row_factors(
    order_ptr,  # int32 [R]
    ends_ptr,
    amax_ptr,  # outer amaxes of the first operand
    w_amax_ptr,  # of each expert's matrix, or one
    weights_ptr,  # FP32 [R], by pair
    out_ptr,  # FP32 [R]
    rows,
    groups,
    k: tl.constexpr,
    A_MAX: tl.constexpr,
    W_MAX: tl.constexpr,
    A: tl.constexpr,  # 0: no scale, 1: one, 2: one a token, 3: one a row
    W: tl.constexpr,  # 0: no scale, 1: one, 2: one an expert
    WEIGHTS: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
):
    """Routing weight * (S_dec of the row * S_dec of its expert's matrix), of those that are asked for."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    mask = row < rows
    pair = tl.load(order_ptr + row, mask=mask, other=0)
    f = tl.full((N,), 1.0, tl.float32)
    if A > 0:
        which = pair // k if A == 2 else (row if A == 3 else row * 0)
        s = rule.encode_scale(tl.load(amax_ptr + which, mask=mask, other=0.0), A_MAX)
        f = tl.div_rn(tl.full((N,), 1.0, tl.float32), s)
    if W > 0:
        expert = row * 0
        if W == 2:
            g = tl.arange(0, G)
            ends = tl.load(ends_ptr + g, mask=g < groups, other=2147483647)
            below = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
            expert = tl.minimum(below, groups - 1)
        s = rule.encode_scale(tl.load(w_amax_ptr + expert, mask=mask, other=0.0), W_MAX)
        f = f * tl.div_rn(tl.full((N,), 1.0, tl.float32), s)
    if WEIGHTS:
        f = tl.load(weights_ptr + pair, mask=mask, other=0.0) * f
    tl.store(out_ptr + row, f, mask=mask)


@triton.jit(do_not_specialize=["rows", "units", "groups"])
def swiglu_rows(
    x_ptr,  # BF16 pairs [R, 2I]
    h_ptr,  # BF16 pairs [R, I]
    factor_ptr,
    ends_ptr,
    rows,
    units,  # I / 8
    groups,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BR: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """h of each row of gate and up."""
    row, u, mask = lanes(rows, units, tl.program_id(1) * N, BR, N)
    inside = mask & (row < tl.load(ends_ptr + groups - 1))
    factor = tl.load(factor_ptr + row, mask=mask, other=0.0) if HAS_FACTOR else 1.0
    at = row * units * 16 + u * 8
    h = load_gated(x_ptr, at, units.to(tl.int64) * 8, inside, factor, HAS_FACTOR, GATE_CAP, UP_CAP, ASM)
    store_values(h_ptr, (row * units + u) * 8, floats(h, True), mask, True, ASM)


@triton.jit(do_not_specialize=["tokens", "units", "groups"])
def combine_rows(
    x_ptr,  # BF16 pairs [R, C]
    factor_ptr,  # FP32 [R]
    place_ptr,  # int32 [R]: row of each pair
    ends_ptr,
    y_ptr,  # BF16 pairs [T, C]
    tokens,
    units,  # C / 8
    groups,
    k: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BR: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Sum of the k rows of each token, times their factors, in FP32 and in the order of the choices."""
    token, u, mask = lanes(tokens, units, tl.program_id(1) * N, BR, N)
    last = tl.load(ends_ptr + groups - 1)
    total = ()
    for _ in tl.static_range(8):
        total = total + (tl.zeros((BR * N,), tl.float32),)
    for choice in tl.static_range(k):
        row = tl.load(place_ptr + token * k + choice, mask=mask, other=0).to(tl.int64)
        x = floats(load_raw(x_ptr, (row * units + u) * 8, mask & (row < last), True), True)
        factor = tl.load(factor_ptr + row, mask=mask, other=0.0) if HAS_FACTOR else 1.0
        more = ()
        for j in tl.static_range(8):
            more = more + (total[j] + (x[j] * factor if HAS_FACTOR else x[j]),)
        total = more
    store_values(y_ptr, (token * units + u) * 8, total, mask, True, ASM)
