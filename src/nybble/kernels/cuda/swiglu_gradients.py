"""Gradients of a SwiGLU over the rows of experts, alone or with what an FP8 product takes of them.

Legend: see `expert_passes.py`. A thread has eight gates, and the eight values that they belong to.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.finish_rows import e4m3_words
from nybble.kernels.cuda.gates import scaled_pairs, swiglu_backward
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4, nvfp4_factor, nvfp4_values
from nybble.kernels.cuda.registers import (
    floats,
    join8,
    load_raw,
    magnitude,
    magnitude_bits,
    max_magnitudes,
    max_pairs,
    pair_bits,
    split4,
)
from nybble.kernels.cuda.rows import top
from nybble.kernels.cuda.stores import bf16_pairs, store_pairs, store_values, store_words

LEAST_AMAX = tl.constexpr(8e-36)  # below it S_enc of NVFP4 is FLT_MAX


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
        dots += g[j] * h[j]
    return dots


@triton.jit
def outer_scale(amax, OUTER_MAX: tl.constexpr):
    """S_dec of an outer amax, to the last place: of a sum that has no order."""
    return tl.maximum(amax, LEAST_AMAX) * (1.0 / OUTER_MAX)


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


@triton.jit
def load_gated_row(
    x_ptr,
    g_ptr,
    h_ptr,
    h_scales_ptr,
    row,
    u,
    mask,
    units,
    scale_columns,
    DOT: tl.constexpr,
):
    """int32 [N, 4] pairs of gate, up and g of a row, what is held of h, and the bytes of its block scales."""
    base = row.to(tl.int64) * units
    at = u[:, None] * 4 + tl.arange(0, 4)[None, :]
    wide = mask[:, None]
    gate = tl.load(x_ptr + base * 8 + at, mask=wide, other=0)
    up = tl.load(x_ptr + base * 8 + units * 4 + at, mask=wide, other=0)
    g = tl.load(g_ptr + base * 4 + at, mask=wide, other=0)
    h = 0
    sf = 0
    if DOT == 1:
        h = tl.load(h_ptr + base * 4 + at, mask=wide, other=0)
    if DOT == 2:
        h = tl.load(h_ptr + base + u, mask=mask, other=0)
        sf = tl.load(h_scales_ptr + row.to(tl.int64) * scale_columns + u // 2, mask=mask, other=0)
    return gate, up, g, h, sf


@triton.jit
def row_scalars(
    factor_ptr,
    g_factor_ptr,
    h_amax_ptr,
    row,
    AMAX_ROWS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_G_FACTOR: tl.constexpr,
    DOT: tl.constexpr,
):
    """Factors of gate and up and of g, and the outer amax of h."""
    factor = tl.load(factor_ptr + row) if HAS_FACTOR else 1.0
    g_factor = tl.load(g_factor_ptr + row) if HAS_G_FACTOR else 1.0
    amax = tl.load(h_amax_ptr + row * AMAX_ROWS) if DOT == 2 else 1.0
    return factor, g_factor, amax


@triton.jit
def pairs_of(p):
    """What `load_raw` returns, of int32 [N, 4]."""
    return split4(p.to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["units", "scale_columns"])
def swiglu_backward_fp8(
    x_ptr,  # as for `swiglu_backward_rows`, up to d
    factor_ptr,
    g_ptr,
    g_factor_ptr,
    weights_ptr,
    order_ptr,
    h_ptr,
    h_scales_ptr,
    h_amax_ptr,
    d_ptr,
    codes_ptr,  # int32 words of E4M3 [R, 2I]: d in fp8-row
    scales_ptr,  # FP32 [R]
    amax_ptr,  # int32 [G, 2I], zeros on entry: bits of the largest |d| of each column of a group
    dot_ptr,
    start_ptr,  # of each tile of 32 rows: its first,
    count_ptr,  # how many it has,
    group_ptr,  # and its group
    units,  # I / 8, at most N
    scale_columns,
    OUTER_MAX: tl.constexpr,
    AMAX_ROWS: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_G_FACTOR: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile that a program goes through
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """`swiglu_backward_rows` of the rows of groups, its result in codes too, and the amax of its columns.

    A row is loaded while the one before it is computed.
    """
    PARTS: tl.constexpr = 32 // ROWS
    tile = tl.program_id(0) // PARTS
    begin = tl.program_id(0) % PARTS * ROWS
    row = tl.load(start_ptr + tile) + begin
    last = row + tl.minimum(tl.load(count_ptr + tile) - begin, ROWS) - 1
    u = tl.arange(0, N)
    inside = u < units
    most = ()
    for _ in tl.static_range(8):
        most = most + (tl.zeros((N,), tl.uint32),)
    if row <= last:
        gate, up, g_raw, h, sf = load_gated_row(
            x_ptr, g_ptr, h_ptr, h_scales_ptr, row, u, inside, units, scale_columns, DOT
        )
        factor, g_factor, h_amax = row_scalars(
            factor_ptr, g_factor_ptr, h_amax_ptr, row, AMAX_ROWS, HAS_FACTOR, HAS_G_FACTOR, DOT
        )
        pair = tl.load(order_ptr + row)
        weight = tl.load(weights_ptr + pair)
        next_pair = tl.load(order_ptr + tl.minimum(row + 1, last))
        while row <= last:
            at = tl.minimum(row + 1, last)
            next_gate, next_up, next_g, next_h, next_sf = load_gated_row(
                x_ptr, g_ptr, h_ptr, h_scales_ptr, at, u, inside & (row < last), units, scale_columns, DOT
            )
            next_factor, next_g_factor, next_amax = row_scalars(
                factor_ptr, g_factor_ptr, h_amax_ptr, at, AMAX_ROWS, HAS_FACTOR, HAS_G_FACTOR, DOT
            )
            next_weight = tl.load(weights_ptr + next_pair)
            later_pair = tl.load(order_ptr + tl.minimum(row + 2, last))

            g = times_factor(floats(pairs_of(g_raw), True), g_factor, HAS_G_FACTOR)
            if DOT > 0:
                dots = tl.zeros((N,), tl.float32)
                if DOT == 1:
                    values = floats(pairs_of(h), True)
                    for j in tl.static_range(8):
                        dots += g[j] * values[j]
                else:
                    word = h.to(tl.uint32, bitcast=True)
                    dots = dot_of_codes(dots, g, word, nvfp4_factor(sf.to(tl.uint32), ASM), ASM)
                dot = tl.sum(dots)
                tl.store(dot_ptr + pair, dot * outer_scale(h_amax, OUTER_MAX) if DOT == 2 else dot)
            dgate, dup = gate_gradients(
                pairs_of(gate), pairs_of(up), g, factor, weight, HAS_FACTOR, GATE_CAP, UP_CAP, ASM
            )
            dgate = bf16_pairs(dgate, 4, ASM)
            dup = bf16_pairs(dup, 4, ASM)
            base = row.to(tl.int64) * units
            store_pairs(d_ptr + base * 8, u * 8, dgate, inside, 4)
            store_pairs(d_ptr + base * 8 + units * 4, u * 8, dup, inside, 4)
            more = ()
            for k in tl.static_range(4):
                more = more + (max_pairs(most[k], dgate[k], ASM),)
            for k in tl.static_range(4):
                more = more + (max_pairs(most[4 + k], dup[k], ASM),)
            most = more

            m = max_magnitudes(magnitude(dgate, True, ASM), magnitude(dup, True, ASM), True, ASM)
            t = top(tl.where(inside, magnitude_bits(m, True), 0))
            mul = rule.fp32_multiplier(value(t + tl.zeros((N,), tl.uint32)))
            scale = tl.where(t >= rule.INFINITE, float("nan"), rule.reciprocal(mul, ASM))
            tl.store(scales_ptr + row + u * 0, scale, mask=u == 0)
            words = ()
            for w in tl.static_range(2):
                pair_of_words = e4m3_words(
                    dgate if w == 0 else dup, mul, (0, 0, 0, 0), False, rule.FP32, True, ASM
                )
                words = words + (
                    tl.where(t >= rule.INFINITE, 0x7F7F7F7F, pair_of_words[0]).to(tl.uint32),
                    tl.where(t >= rule.INFINITE, 0x7F7F7F7F, pair_of_words[1]).to(tl.uint32),
                )
            store_words(codes_ptr + base * 4, u * 2, (words[0], words[1]), inside, 2)
            store_words(codes_ptr + base * 4 + units * 2, u * 2, (words[2], words[3]), inside, 2)

            gate, up, g_raw, h, sf = next_gate, next_up, next_g, next_h, next_sf
            factor, g_factor, h_amax = next_factor, next_g_factor, next_amax
            pair, weight, next_pair = next_pair, next_weight, later_pair
            row += 1
        group = tl.load(group_ptr + tile).to(tl.int64)
        for half in tl.static_range(2):
            columns = ()
            for k in tl.static_range(4):
                columns = columns + pair_bits(most[4 * half + k])
            to = amax_ptr + (group * 2 + half) * units * 8 + u[:, None] * 8 + tl.arange(0, 8)[None, :]
            t = join8(columns).to(tl.int32)
            tl.atomic_max(to, t, mask=inside[:, None] & (t > 0), sem="relaxed")
