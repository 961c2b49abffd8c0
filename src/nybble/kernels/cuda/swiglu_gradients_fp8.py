"""Gradients of a SwiGLU over the rows of experts with what FP8 products take of them.

Legend: see `expert_passes.py`. A unit is eight gates and the eight values that they belong to.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.finish_rows import e4m3_words
from nybble.kernels.cuda.nvfp4 import nvfp4_factor
from nybble.kernels.cuda.registers import (
    floats,
    magnitude,
    magnitude_bits,
    max_magnitudes,
    split4,
)
from nybble.kernels.cuda.stores import bf16_pairs
from nybble.kernels.cuda.swiglu_gradients import dot_of_codes, gate_gradients, outer_scale, times_factor
from nybble.kernels.cuda.transposed import transpose_tile


@triton.jit
def load_gated_row(
    x_ptr, g_ptr, h_ptr, h_scales_ptr, row, u, wanted, units, scale_columns,
    DOT: tl.constexpr, N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Of units u, u + N ... of a row: int32 [N, 4] pairs of gate, up and g, what is held of h, and the bytes
    of its block scales."""
    base = row.to(tl.int64) * units
    out = ()
    for c in tl.static_range(UNITS):
        unit = u + c * N
        mask = (unit < units) & wanted
        at = unit[:, None] * 4 + tl.arange(0, 4)[None, :]
        wide = mask[:, None]
        gate = tl.load(x_ptr + base * 8 + at, mask=wide, other=0)
        up = tl.load(x_ptr + base * 8 + units * 4 + at, mask=wide, other=0)
        g = tl.load(g_ptr + base * 4 + at, mask=wide, other=0)
        h = 0
        sf = 0
        if DOT == 1:
            h = tl.load(h_ptr + base * 4 + at, mask=wide, other=0)
        if DOT == 2:
            h = tl.load(h_ptr + base + unit, mask=mask, other=0)
            sf = tl.load(h_scales_ptr + row.to(tl.int64) * scale_columns + unit // 2, mask=mask, other=0)
        out = out + ((gate, up, g, h, sf),)
    return out


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
def eight_codes(pairs, mul, top, ASM: tl.constexpr):
    """int64 of eight E4M3 codes of BF16 pairs; NaN where the top of their row's magnitudes (bits) is none."""
    low, high = e4m3_words(pairs, mul, (0, 0, 0, 0), False, rule.FP32, True, ASM)
    low = tl.where(top >= rule.INFINITE, 0x7F7F7F7F, low).to(tl.uint32)
    high = tl.where(top >= rule.INFINITE, 0x7F7F7F7F, high).to(tl.uint32)
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def sum_and_maximum(a, m, b, n):
    """Of two pairs, for a reduction of both at once."""
    return a + b, tl.maximum(m, n)


@triton.jit
def pairs_of(p):
    """What `load_raw` returns, of int32 [N, 4]."""
    return split4(p.to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "tiles", "units", "groups", "scale_columns"])
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
    codes_ptr,  # int64, eight E4M3 [R, 2I] each: d in fp8-row
    columns_ptr,  # int64, the same as columns [2I, P]
    scales_ptr,  # FP32 [R], 0 for rows of zeros
    dot_ptr,
    start_ptr,  # of each tile of P: its first row,
    count_ptr,  # and its rows, -1 for padding
    ends_ptr,
    rows,
    tiles,
    units,  # I / 8, at most N * UNITS
    groups,
    scale_columns,
    OUTER_MAX: tl.constexpr,
    AMAX_ROWS: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_G_FACTOR: tl.constexpr,
    DOT: tl.constexpr,
    N: tl.constexpr,  # threads
    UNITS: tl.constexpr,  # of eight gates that each has of a row
    ASM: tl.constexpr,
):
    """`swiglu_backward_rows`, its result in codes, of one tile of rows.

    A row is loaded while the one before it is computed. When all are there their codes, which the L2 cache
    has, are read again and become columns.
    """
    tile = tl.program_id(0)
    first = tl.load(start_ptr + tile)
    count = tl.load(count_ptr + tile)
    last = tl.minimum(first + count, rows) - 1
    row = tl.minimum(first, rows - 1)
    u = tl.arange(0, N)
    loaded = load_gated_row(
        x_ptr, g_ptr, h_ptr, h_scales_ptr, row, u, row <= last, units, scale_columns, DOT, N, UNITS
    )
    factor, g_factor, h_amax = row_scalars(
        factor_ptr, g_factor_ptr, h_amax_ptr, row, AMAX_ROWS, HAS_FACTOR, HAS_G_FACTOR, DOT
    )
    pair = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + pair)
    next_pair = tl.load(order_ptr + tl.maximum(tl.minimum(row + 1, last), 0))
    while row <= last:
        at = tl.minimum(row + 1, last)
        later = load_gated_row(
            x_ptr, g_ptr, h_ptr, h_scales_ptr, at, u, row < last, units, scale_columns, DOT, N, UNITS
        )
        next_factor, next_g_factor, next_amax = row_scalars(
            factor_ptr, g_factor_ptr, h_amax_ptr, at, AMAX_ROWS, HAS_FACTOR, HAS_G_FACTOR, DOT
        )
        next_weight = tl.load(weights_ptr + next_pair)
        later_pair = tl.load(order_ptr + tl.minimum(row + 2, last))

        dots = tl.zeros((N,), tl.float32)
        top = tl.zeros((N,), tl.uint32)
        found = ()
        for c in tl.static_range(UNITS):
            gate, up, g_raw, h, sf = loaded[c]
            g = times_factor(floats(pairs_of(g_raw), True), g_factor, HAS_G_FACTOR)
            if DOT == 1:
                values = floats(pairs_of(h), True)
                for j in tl.static_range(8):
                    dots = tl.fma(g[j], values[j], dots)
            if DOT == 2:
                word = h.to(tl.uint32, bitcast=True)
                dots = dot_of_codes(dots, g, word, nvfp4_factor(sf.to(tl.uint32), ASM), ASM)
            dgate, dup = gate_gradients(
                pairs_of(gate), pairs_of(up), g, factor, weight, HAS_FACTOR, GATE_CAP, UP_CAP, ASM
            )
            dgate = bf16_pairs(dgate, 4, ASM)
            dup = bf16_pairs(dup, 4, ASM)
            m = max_magnitudes(magnitude(dgate, True, ASM), magnitude(dup, True, ASM), True, ASM)
            top = max_magnitudes(top, tl.where(u + c * N < units, m, 0).to(tl.uint32), True, ASM)
            found = found + ((dgate, dup),)
        m = magnitude_bits(top, True).to(tl.int32)
        if DOT > 0:
            dot, t = tl.reduce((dots, m), 0, sum_and_maximum)
            tl.store(dot_ptr + pair, dot * outer_scale(h_amax, OUTER_MAX) if DOT == 2 else dot)
        else:
            t = tl.max(m, axis=0)
        t = t.to(tl.uint32)
        mul = rule.fp32_multiplier(value(t + tl.zeros((N,), tl.uint32)))
        scale = tl.where(t >= rule.INFINITE, float("nan"), rule.reciprocal(mul, ASM))
        tl.store(scales_ptr + row + u * 0, tl.where(t == 0, 0.0, scale), mask=u == 0)
        to = codes_ptr + row.to(tl.int64) * units * 2
        for c in tl.static_range(UNITS):
            dgate, dup = found[c]
            unit = u + c * N
            tl.store(to + unit, eight_codes(dgate, mul, t, ASM), mask=unit < units)
            tl.store(to + units + unit, eight_codes(dup, mul, t, ASM), mask=unit < units)

        loaded = later
        factor, g_factor, h_amax = next_factor, next_g_factor, next_amax
        pair, weight, next_pair = next_pair, next_weight, later_pair
        row += 1
    tl.debug_barrier()
    transpose_tile(codes_ptr, columns_ptr, tile, first, count, units * 2, tiles, N, ASM)
    if DOT > 0:
        row = tl.load(ends_ptr + groups - 1) + tile
        while row < rows:
            tl.store(dot_ptr + tl.load(order_ptr + row), 0.0)
            row += tiles
