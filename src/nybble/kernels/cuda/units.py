"""Units of 8 or 16 elements that threads own: how they are read, their largest magnitudes, and their rows."""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.gates import load_gated
from nybble.kernels.cuda.registers import (
    finite_magnitude,
    load_raw,
    magnitude,
    magnitude_bits,
    max_magnitudes,
    umax,
)


@triton.jit
def load_unit(x_ptr, start, unit, mask, CHUNKS: tl.constexpr, BF16: tl.constexpr):
    """The raw chunks of each unit, counted from element `start`."""
    raws = ()
    for c in tl.static_range(CHUNKS):
        raws = raws + (load_raw(x_ptr, start + unit * (8 * CHUNKS) + 8 * c, mask, BF16),)
    return raws


@triton.jit
def load_row(
    x_ptr,
    start,
    unit,
    mask,
    units,
    factor,
    GATED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
):
    """The raw chunks of each unit of x, or of the SwiGLU of its two halves, each `units` units wide."""
    if GATED:
        raws = ()
        for c in tl.static_range(CHUNKS):
            at = start + unit * (8 * CHUNKS) + 8 * c
            half = units * (8 * CHUNKS)
            raws = raws + (load_gated(x_ptr, at, half, mask, factor, HAS_FACTOR, GATE_CAP, UP_CAP, ASM),)
        return raws
    else:
        return load_unit(x_ptr, start, unit, mask, CHUNKS, BF16)


@triton.jit
def unit_magnitude(raws, CHUNKS: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """FP32 bits of the largest magnitude of each unit."""
    m = magnitude(raws[0], BF16, ASM)
    for c in tl.static_range(1, CHUNKS):
        m = max_magnitudes(m, magnitude(raws[c], BF16, ASM), BF16, ASM)
    return magnitude_bits(m, BF16)


@triton.jit
def finite_unit_magnitude(raws, CHUNKS: tl.constexpr, BF16: tl.constexpr):
    """The same over finite elements."""
    m = finite_magnitude(raws[0], BF16)
    for c in tl.static_range(1, CHUNKS):
        m = umax(m, finite_magnitude(raws[c], BF16))
    return m


@triton.jit
def top(m):
    """Largest entry of a uint32 tensor below 2^31, as a scalar."""
    return tl.max(m.to(tl.int32), axis=0).to(tl.uint32)


@triton.jit
def row_tops(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The largest entry of each of HEIGHT rows, given to all WIDTH entries of it."""
    t = tl.max(tl.reshape(m.to(tl.int32), (HEIGHT, WIDTH)), axis=1)
    t = tl.broadcast_to(t[:, None], (HEIGHT, WIDTH))
    return tl.reshape(t, (HEIGHT * WIDTH,)).to(tl.uint32)


@triton.jit
def flat(tile, n, units, N: tl.constexpr):
    """Row and place in it of units n of a tile, where tiles go on from row to row.

    Those of the tile's first are found in 64 bits, once; the others from it in 32.
    """
    first = tile.to(tl.int64) * N
    row = first // units
    place = (first - row * units).to(tl.int32) + n
    return row + place // units, (place % units).to(tl.int64)


@triton.jit
def of_row(ptr, row, mask, PACKED: tl.constexpr):
    """What `ptr` holds of a row, or of each unit's row."""
    if PACKED:
        return tl.load(ptr + row, mask=mask, other=0)
    else:
        return tl.load(ptr + row)
