"""Gradients of a SwiGLU over the rows of experts in both of their MXFP8 forms, from one read.

Legend: see `expert_passes.py`. A warp takes 32 rows of an expert x 32 gates, and the values that these belong
to; a thread 4 rows x 8 gates. Rows are an axis of every tensor: with a tensor for each, Triton compiles half
a minute.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.both import along_features
from nybble.kernels.cuda.e4m3 import e4m3_values, e4m3_word_nearest
from nybble.kernels.cuda.nvfp4 import load_factor, load_nvfp4
from nybble.kernels.cuda.registers import floats, load_raw, pair_bits
from nybble.kernels.cuda.sources import block_bounds
from nybble.kernels.cuda.stores import bf16_pairs, store_values
from nybble.kernels.cuda.swiglu_gradients import dot_of_codes, gate_gradients, outer_scale, times_factor


@triton.jit
def row_of(t, w, lane, start_ptr, count_ptr, blocks, rows, W: tl.constexpr):
    """(row, whether it is one) of row t of eight neighbours, `lane`, in block w of a program."""
    block = tl.program_id(1) * W + w
    start, count = block_bounds(start_ptr, count_ptr, block, block < blocks, rows, 32, True)
    place = t * 8 + lane
    return (start + place).to(tl.int64), (block < blocks) & (place < count)


@triton.jit
def along_tokens(raw, SCALE: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Eight FP32 [128 W]: eight features of each row rounded in their blocks, of a warp's 32 rows."""
    x = floats(raw, True)
    most = ()
    for k in tl.static_range(4):
        most = most + pair_bits(raw[k])
    scaled = ()
    scales = ()
    for j in tl.static_range(8):
        m = tl.reshape(most[j].to(tl.int32), (4, W, 8, 4))
        m = tl.max(tl.max(m, axis=0), axis=1).to(tl.uint32)
        byte = rule.e8m0_byte(m, 448.0, SCALE)
        scaled = scaled + (x[j] * to_rows(rule.e8m0_multiplier(byte), W),)
        scales = scales + (to_rows(rule.e8m0_value(byte), W),)
    low = e4m3_word_nearest(scaled[0], scaled[1], scaled[2], scaled[3], ASM)
    high = e4m3_word_nearest(scaled[4], scaled[5], scaled[6], scaled[7], ASM)
    q = e4m3_values(low, ASM) + e4m3_values(high, ASM)
    v = ()
    for j in tl.static_range(8):
        v = v + (q[j] * scales[j],)
    return v


@triton.jit
def to_rows(t, W: tl.constexpr):
    """[W, 4], of the blocks of a program, to every row of them."""
    return tl.reshape(tl.broadcast_to(t[None, :, None, :], (4, W, 8, 4)), (128 * W,))


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
    parts_ptr,  # FP32 [I / 32, R]: <g, h> of 32 gates, without the outer scale of h
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
    n = tl.arange(0, 128 * W)  # a row of four, a block of W, a row of eight, a unit of four
    column = ((tl.program_id(0) * 4 + n % 4) * 8).to(tl.int64)
    row, mask = row_of(n // (32 * W), n // 32 % W, n // 4 % 8, start_ptr, count_ptr, blocks, rows, W)

    weight = tl.load(weights_ptr + tl.load(order_ptr + row, mask=mask, other=0), mask=mask, other=0.0)
    factor = tl.load(factor_ptr + row, mask=mask, other=0.0) if HAS_FACTOR else 1.0
    g_factor = tl.load(g_factor_ptr + row, mask=mask, other=0.0) if HAS_G_FACTOR else 1.0
    at = row * width + column
    g = times_factor(floats(load_raw(g_ptr, at, mask, True), True), g_factor, HAS_G_FACTOR)
    if DOT > 0:
        dot = tl.zeros((128 * W,), tl.float32)
        if DOT == 1:
            h = floats(load_raw(h_ptr, at, mask, True), True)
            for j in tl.static_range(8):
                dot += g[j] * h[j]
        else:
            sf = load_factor(h_scales_ptr, row * scale_columns + (column >> 4), mask, ASM)
            dot = dot_of_codes(dot, g, load_nvfp4(h_ptr, at >> 3, mask), sf, ASM)
        q = tl.arange(0, 32 * W)  # the same without units
        q_row, q_mask = row_of(q // (8 * W), q // 8 % W, q % 8, start_ptr, count_ptr, blocks, rows, W)
        to_ptr = parts_ptr + tl.program_id(0).to(tl.int64) * rows + q_row
        tl.store(to_ptr, tl.sum(tl.reshape(dot, (32 * W, 4)), axis=1), mask=q_mask)

    at += row * width
    gate, up = load_raw(x_ptr, at, mask, True), load_raw(x_ptr, at + width, mask, True)
    dgate, dup = gate_gradients(gate, up, g, factor, weight, HAS_FACTOR, GATE_CAP, UP_CAP, ASM)
    for half in tl.static_range(2):
        raw = bf16_pairs(dup if half else dgate, 4, ASM)
        v = along_features(raw, (0, 0, 0, 0), SCALE, False, True, ASM)
        store_values(along_features_ptr, at + half * width, v, mask, True, ASM)
        v = along_tokens(raw, SCALE, W, ASM)
        store_values(along_tokens_ptr, at + half * width, v, mask, True, ASM)


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
