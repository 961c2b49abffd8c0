"""Gradients of a SwiGLU over the rows of experts in both of their MXFP8 forms, from one read.

Legend: see `expert_passes.py`. A warp takes 32 rows of an expert x 64 gates, and the values that these belong
to; a thread 8 rows x 8 gates.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda.both import along_features, store_along_tokens
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4
from nybble.kernels.cuda.registers import advance, floats, join8, load_raw
from nybble.kernels.cuda.sources import block_bounds
from nybble.kernels.cuda.stores import bf16_pairs, store_values
from nybble.kernels.cuda.swiglu_gradients import dot_of_codes, gate_gradients, outer_scale, times_factor


@triton.jit(do_not_specialize=["rows", "blocks", "scale_columns"])
def swiglu_backward_both(
    x_ptr,  # as for `swiglu_backward_rows`, up to h
    factor_ptr,
    g_ptr,
    g_factor_ptr,
    weights_ptr,
    order_ptr,
    h_ptr,
    h_scales_ptr,
    along_features_ptr,  # BF16 pairs [R, 2I]: the gradient, blocks along the features
    along_tokens_ptr,  # the same, blocks along the rows of an expert
    parts_ptr,  # FP32 [ceil(I / 64), R]: <g, h> of 64 gates, without the outer scale of h
    start_ptr,  # of each block of 32 rows: its first row,
    count_ptr,  # and its rows, -1 for padding
    rows,
    width,  # I, a multiple of 32
    blocks,
    scale_columns,
    SCALE: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_G_FACTOR: tl.constexpr,
    DOT: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """`swiglu_backward_rows` and `fake_quantize_both` of its result, to nearest."""
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * 8 + n % 8) * 8
    block = tl.program_id(1) * W + n // 32
    first = (n // 8) % 4 * 8
    has_block = block < blocks
    start, count = block_bounds(start_ptr, count_ptr, block, has_block, rows, 32, True)
    inside = has_block & (column < width)
    row = (start + first).to(tl.int64)
    column = column.to(tl.int64)

    gates = ()
    ups = ()
    dots = ()
    for i in tl.static_range(8):
        mask = inside & (first + i < count)
        r = row + i
        weight = tl.load(weights_ptr + tl.load(order_ptr + r, mask=mask, other=0), mask=mask, other=0.0)
        factor = tl.load(factor_ptr + r, mask=mask, other=0.0) if HAS_FACTOR else 1.0
        g_factor = tl.load(g_factor_ptr + r, mask=mask, other=0.0) if HAS_G_FACTOR else 1.0
        at = r * width + column
        g = times_factor(floats(load_raw(g_ptr, at, mask, True), True), g_factor, HAS_G_FACTOR)
        dot = tl.zeros((32 * W,), tl.float32)
        if DOT == 1:
            h = floats(load_raw(h_ptr, at, mask, True), True)
            for j in tl.static_range(8):
                dot += g[j] * h[j]
        if DOT == 2:
            sf = load_factor(h_scales_ptr, r * scale_columns + (column >> 4), mask, ASM)
            dot = dot_of_codes(dot, g, load_nvfp4(h_ptr, at >> 3, mask), sf, ASM)
        dots = dots + (dot,)
        at += r * width
        gate, up = load_raw(x_ptr, at, mask, True), load_raw(x_ptr, at + width, mask, True)
        dgate, dup = gate_gradients(gate, up, g, factor, weight, HAS_FACTOR, GATE_CAP, UP_CAP, ASM)
        gates = gates + (bf16_pairs(dgate, 4, ASM),)
        ups = ups + (bf16_pairs(dup, 4, ASM),)

    if DOT > 0:
        w = tl.arange(0, 4 * W)  # what eight lanes, a row each of which has 64 gates in all, leave
        w_block = tl.program_id(1) * W + w // 4
        w_first = w % 4 * 8
        w_start, w_count = block_bounds(start_ptr, count_ptr, w_block, w_block < blocks, rows, 32, True)
        i = tl.arange(0, 8)[None, :]
        dot = tl.sum(tl.reshape(join8(dots), (4 * W, 8, 8)), axis=1)
        at = tl.program_id(0).to(tl.int64) * rows + (w_start + w_first)[:, None] + i
        ok = (w_block < blocks)[:, None] & (w_first[:, None] + i < w_count[:, None])
        tl.store(parts_ptr + at, dot, mask=ok)

    for half in tl.static_range(2):
        raws = ups if half else gates
        to_column = column + width if half else column
        to_ptr = advance(along_features_ptr, row * (2 * width) + to_column, True)
        for i in tl.static_range(8):
            v = along_features(raws[i], (0, 0, 0, 0), SCALE, False, True, W, ASM)
            store_values(to_ptr, 2 * width * i, v, inside & (first + i < count), True, ASM)
        store_along_tokens(
            along_tokens_ptr, raws, (), (0, 0, 0, 0, 0), 0, row, first, count, to_column, inside, 2 * width,
            SCALE, False, 0, True, W, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "groups"])
def add_dots(
    parts_ptr,
    order_ptr,
    h_amax_ptr,  # [R] or one
    dot_ptr,  # FP32 by pair
    ends_ptr,
    rows,
    groups,
    PARTS: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    AMAX_ROWS: tl.constexpr,
    CODED: tl.constexpr,
    N: tl.constexpr,
):
    """<g, h> of each row from its parts; 0 of rows of no expert."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    inside = row < tl.load(ends_ptr + groups - 1)
    dot = tl.zeros((N,), tl.float32)
    for part in tl.static_range(PARTS):
        dot += tl.load(parts_ptr + (rows.to(tl.int64) * part + row), mask=inside, other=0.0)
    if CODED:
        amax = tl.load(h_amax_ptr + row * AMAX_ROWS, mask=inside, other=0.0)
        dot = tl.where(inside, dot * outer_scale(amax, OUTER_MAX), 0.0)
    mask = row < rows
    tl.store(dot_ptr + tl.load(order_ptr + row, mask=mask, other=0), dot, mask=mask)
