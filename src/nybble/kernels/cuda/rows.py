"""Quantise along the last axis: blocks of 16, 32 or 128 elements, or a whole row.

A thread owns units of 8 or 16 elements, a block or part of one. A program takes a row, a part of one, or
several narrow ones; tensors whose rows need not be told apart come as a single long row.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import load_key
from nybble.kernels.cuda.elements import value
from nybble.kernels.cuda.finish_rows import finish_units
from nybble.kernels.cuda.registers import advance, umax
from nybble.kernels.cuda.units import (
    finite_unit_magnitude,
    flat,
    load_row,
    of_row,
    row_tops,
    top,
    unit_magnitude,
)

OUTER_NONE = tl.constexpr(0)
OUTER_ROW = tl.constexpr(1)
OUTER_GIVEN = tl.constexpr(2)


@triton.jit(
    do_not_specialize=["code_stride", "scale_stride", "amax_stride", "units", "count", "groups", "tag"]
)
def quantize_rows(
    x_ptr,  # BF16 as int32 pairs, or FP32
    codes_ptr,  # int32 words
    scales_ptr,  # uint8, or FP32 for FP8 formats
    values_ptr,  # like x_ptr
    amax_ptr,  # outer amaxes: written if OUTER_ROW, read if OUTER_GIVEN
    key_ptr,
    rows_ptr,
    offs_ptr,
    group_ptr,  # int32: which outer amax a row has, if HAS_GROUP
    factor_ptr,  # FP32: what each row of gate and up is multiplied by, if HAS_FACTOR
    place_ptr,  # int32 [R * COPIES]: rows of the values of each row, if COPIES > 0
    row_stride,  # of x, in elements
    columns,  # C of the logical tensor, by which draws are counted
    value_stride,  # of a row of values, in elements
    code_stride,  # of a row of codes, in units
    scale_stride,  # of a row of block scales
    amax_stride,  # from row to row, where they are written
    units,  # a row
    count,  # R
    groups,
    tag,  # layer << 8 | operand
    GATE_CAP: tl.constexpr,  # of the soft-capped SwiGLU, 0 for the plain one; see GATED
    UP_CAP: tl.constexpr,
    GATED: tl.constexpr,  # x is gate and up beside each other, and their SwiGLU is what is quantised
    HAS_FACTOR: tl.constexpr,
    CODES: tl.constexpr,  # whether codes and scales are stored
    COPIES: tl.constexpr,
    E2M1: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,  # 0: the whole row is a block
    OUTER: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    OVER_SIX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VALUES: tl.constexpr,
    IN_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_OFFS: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROW_AXIS: tl.constexpr,  # of the grid; the other one counts tiles of a row
    LOOPS: tl.constexpr,  # tiles of a row that one program goes through
    HEIGHT: tl.constexpr,  # rows of a tile, if it holds whole ones; 0: tiles go on in the next row
    N: tl.constexpr,  # units of a tile
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Codes and scales, or values, or both, of rows of x [R, units * 8 * CHUNKS], padded with zeros."""
    WHOLE_ROW: tl.constexpr = OUTER == OUTER_ROW or BLOCK_UNITS == 0
    PACKED: tl.constexpr = HEIGHT != 1  # `row`, and what belongs to a row, holds one a unit
    WIDTH: tl.constexpr = N // max(HEIGHT, 1)
    n = tl.arange(0, N)
    tile = 0  # the program's first unit of its row
    left = 0  # and the row's units from there on
    if HEIGHT == 0:
        row, u = flat(tl.program_id(0), n, units, N)
        mask = row < count
    elif PACKED:
        row = tl.program_id(0).to(tl.int64) * HEIGHT + n // WIDTH
        u = n % WIDTH
        mask = (u < units) & (row < count)
    else:
        row = tl.program_id(ROW_AXIS).to(tl.int64)
        tile = tl.program_id(1 - ROW_AXIS).to(tl.int64) * (N * LOOPS)
        left = tl.minimum(units - tile, N * LOOPS).to(tl.int32)
        u = n
        mask = u < left
    inside = True
    if HAS_OFFS:
        inside = row < tl.load(offs_ptr + groups - 1)
    # Of one row all addresses are 64 bits once and 32 bits a unit.
    start = row * row_stride
    if not PACKED:
        x_ptr = advance(x_ptr, start + tile * (8 * CHUNKS), IN_BF16)
        start = 0
    outer_amax = 0.0
    row_bad = False
    factor = 1.0
    if HAS_FACTOR:
        factor = of_row(factor_ptr, row, mask, PACKED)
    if LOOPS == 1:
        raws = load_row(
            x_ptr, start, u, mask & inside, units, factor,
            GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
        )  # fmt: skip
        m = unit_magnitude(raws, CHUNKS, IN_BF16, ASM)
    if WHOLE_ROW:
        if PACKED:
            t = row_tops(m, HEIGHT, WIDTH)
            row_bad = t >= rule.INFINITE
            if top(t) >= rule.INFINITE:
                t = tl.where(
                    row_bad, row_tops(finite_unit_magnitude(raws, CHUNKS, IN_BF16), HEIGHT, WIDTH), t
                )
        elif LOOPS == 1:
            t = top(m)
            row_bad = t >= rule.INFINITE
            if row_bad:  # a second look, at finite elements
                t = top(finite_unit_magnitude(raws, CHUNKS, IN_BF16))
        else:
            most = tl.zeros((N,), tl.uint32)
            for i in range(LOOPS):
                more = load_row(
                    x_ptr, start, u + i * N, (u + i * N < left) & inside, units, factor,
                    GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
                )  # fmt: skip
                most = umax(most, unit_magnitude(more, CHUNKS, IN_BF16, ASM))
            t = top(most)
            row_bad = t >= rule.INFINITE
            if row_bad:
                most = tl.zeros((N,), tl.uint32)
                for i in range(LOOPS):
                    more = load_row(
                        x_ptr, start, u + i * N, (u + i * N < left) & inside, units, factor,
                        GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
                    )  # fmt: skip
                    most = umax(most, finite_unit_magnitude(more, CHUNKS, IN_BF16))
                t = top(most)
        outer_amax = value(t)
        if OUTER == OUTER_ROW:
            if PACKED:
                tl.store(amax_ptr + row * amax_stride, outer_amax, mask=mask & (u == 0))
            else:
                tl.store(amax_ptr + row * amax_stride, outer_amax)
    if OUTER == OUTER_GIVEN:
        which = row
        if HAS_GROUP:
            which = of_row(group_ptr, row, mask, PACKED).to(tl.int64)
        outer_amax = of_row(amax_ptr, which, mask, PACKED)
    s_enc = 1.0
    s_dec = 1.0
    if OUTER != OUTER_NONE:
        s_enc = rule.encode_scale(outer_amax, OUTER_MAX)
        s_dec = tl.div_rn(1.0, s_enc)
    e_row = row
    if HAS_ROWS:
        e_row = of_row(rows_ptr, row, mask, PACKED)
    key = (0, 0, 0, 0)
    if STOCHASTIC:
        key = load_key(key_ptr)
    if LOOPS == 1:
        finish_units(
            raws, m, u, mask, tile, row, e_row, row_bad, outer_amax, s_enc, s_dec,
            codes_ptr, scales_ptr, values_ptr, place_ptr, key, columns, value_stride, code_stride,
            scale_stride, units, tag, E2M1, ELEMENT_MAX, SCALE, BLOCK_UNITS, OUTER_MAX, OVER_SIX, STOCHASTIC,
            CODES, VALUES, COPIES, IN_BF16, OUT_BF16, ALIGNED, 0, PACKED, N, CHUNKS, ASM,
        )  # fmt: skip
    else:
        for i in range(LOOPS):
            more = load_row(
                x_ptr, start, u + i * N, (u + i * N < left) & inside, units, factor,
                GATED, HAS_FACTOR, GATE_CAP, UP_CAP, CHUNKS, IN_BF16, ASM,
            )  # fmt: skip
            mm = unit_magnitude(more, CHUNKS, IN_BF16, ASM)
            finish_units(
                more, mm, u + i * N, u + i * N < left, tile, row, e_row, row_bad, outer_amax, s_enc, s_dec,
                codes_ptr, scales_ptr, values_ptr, place_ptr, key, columns, value_stride, code_stride,
                scale_stride, units, tag, E2M1, ELEMENT_MAX, SCALE, BLOCK_UNITS, OUTER_MAX, OVER_SIX,
                STOCHASTIC, CODES, VALUES, COPIES, IN_BF16, OUT_BF16, ALIGNED, 0, False, N, CHUNKS, ASM,
            )  # fmt: skip
