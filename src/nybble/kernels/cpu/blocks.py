"""Passes over one row of blocks: n elements from position `at` of a flat array, which share scales by block.

`shift` says how: SINGLE, each element is a block of its own (blocks run down the rows of a tile, so that
each column has its own scale); else a block is 16 << shift elements, the last one may be short. All but the
tail goes in runs of 16, see `runs.py`.
"""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import ABS, F32, INFINITY, U32, U64, as_bits, as_float
from nybble.kernels.cpu.jit import helper
from nybble.kernels.cpu.runs import peak_of_run, scale_run

SINGLE = -1
WHOLE_ROW = 58  # a block longer than any row
BF16_ABS = np.uint16(0x7FFF)
BF16_INFINITY = np.uint16(0x7F80)


@helper
def block_of(i: int, shift: int) -> int:
    """The block of element i."""
    return i if shift == SINGLE else i >> (shift + 4)


@helper
def block_count(n: int, shift: int) -> int:
    """Blocks that n elements take."""
    return 0 if n == 0 else block_of(n - 1, shift) + 1


@helper
def raise_peaks(x: Any, at: int, n: int, shift: int, peak: Any) -> None:
    """peak[b] = max(peak[b], bits of |x| over block b); NaN counts as larger than infinity."""
    if shift == SINGLE:
        for i in range(n):
            peak[i] = max(peak[i], U32(as_bits(x[U64(at + i)]) & ABS))
        return
    runs = n >> 4
    for k in range(runs):
        b = U64(k >> shift)
        peak[b] = max(peak[b], peak_of_run(x, U64(at + (k << 4))))
    for i in range(runs << 4, n):
        b = U64(i >> (shift + 4))
        peak[b] = max(peak[b], U32(as_bits(x[U64(at + i)]) & ABS))


@helper
def multiply(x: Any, at: int, n: int, scale: Any, shift: int, out: Any, to: int) -> None:
    """out[to + i] = x[at + i] times its block's scale; the ranges must not overlap."""
    if shift == SINGLE:
        for i in range(n):
            out[U64(to + i)] = x[U64(at + i)] * scale[i]
        return
    runs = n >> 4
    for k in range(runs):
        scale_run(x, U64(at + (k << 4)), scale[U64(k >> shift)], out, U64(to + (k << 4)))
    for i in range(runs << 4, n):
        out[U64(to + i)] = x[U64(at + i)] * scale[U64(i >> (shift + 4))]


@helper
def finite_amax(x: Any, at: int, n: int) -> Any:
    """The largest finite |x|, as float32."""
    top = U32(0)
    for i in range(n):
        top = max(top, U32(as_bits(x[U64(at + i)]) & ABS))
    if top >= INFINITY:
        top = U32(0)
        for i in range(n):
            a = U32(as_bits(x[U64(at + i)]) & ABS)
            top = max(top, U32(0) if a >= INFINITY else a)
    return as_float(top)


@helper
def finite_amax_bf16(x: Any, at: int, n: int) -> Any:
    """The same of BF16 values, given as uint16."""
    top = np.uint16(0)
    for i in range(n):
        top = max(top, np.uint16(x[U64(at + i)] & BF16_ABS))
    if top >= BF16_INFINITY:
        top = np.uint16(0)
        for i in range(n):
            a = np.uint16(x[U64(at + i)] & BF16_ABS)
            top = max(top, np.uint16(0) if a >= BF16_INFINITY else a)
    return as_float(U32(U32(top) << U32(16)))


@helper
def widen(x: Any, at: int, n: int, out: Any, to: int) -> None:
    """BF16 values, given as uint16, to float32."""
    for i in range(n):
        out[U64(to + i)] = as_float(U32(U32(x[U64(at + i)]) << U32(16)))


@helper
def add_errors(
    values: Any,
    x: Any,
    at: int,
    n: int,
    decoded: Any,
    amax: Any,
    outer_max: Any,
    shift: int,
    squares: Any,
    total: Any,
) -> None:
    """total[b] += (((value * decoded) * amax) / outer_max - x)^2 of each element, one after the other.

    Four Over Six's error. `values` and `squares` are overwritten: squares are computed side by side, sums
    follow the order.
    """
    start = np.int64(0)
    multiply(values, start, n, decoded, shift, squares, start)
    multiply(squares, start, n, amax, shift, values, start)
    divisor = F32(outer_max)
    for i in range(n):
        d = values[i] / divisor - x[U64(at + i)]
        squares[i] = d * d
    for b in range(block_count(n, shift)):
        first = b if shift == SINGLE else b << (shift + 4)
        last = b + 1 if shift == SINGLE else min(n, (b + 1) << (shift + 4))
        t = total[b]
        for i in range(first, last):
            t += squares[i]
        total[b] = t


@helper
def overwrite_bad(codes: Any, at: int, n: int, decoded: Any, shift: int, code: int) -> None:
    """Set the codes of the blocks whose decoded scale is NaN."""
    for i in range(n):
        scale = decoded[U64(block_of(i, shift))]
        if scale != scale:
            codes[U64(at + i)] = np.uint8(code)


@helper
def pack(codes: Any, n: int, packed: Any, to: int) -> None:
    """Two four-bit codes a byte, the first in the low nibble; an odd tail has a high nibble of 0."""
    half = n >> 1
    for i in range(half):
        k = U64(i) << U64(1)
        packed[U64(to + i)] = np.uint8(codes[k] | (codes[k + U64(1)] << 4))
    if n & 1:
        packed[U64(to + half)] = codes[U64(n - 1)]


@helper
def store_transposed(
    tile: Any, stride: int, count: int, n: int, packed: bool, codes: Any, to: int, column_bytes: int
) -> None:
    """Column j of tile [count, stride] to codes[to + j * column_bytes] and on, two rows a byte if packed."""
    for j in range(n):
        target = to + j * column_bytes
        if packed:
            half = count >> 1
            for i in range(half):
                k = 2 * i * stride + j
                codes[U64(target + i)] = np.uint8(tile[U64(k)] | (tile[U64(k + stride)] << 4))
            if count & 1:
                codes[U64(target + half)] = tile[U64((count - 1) * stride + j)]
        else:
            for i in range(count):
                codes[U64(target + i)] = tile[U64(i * stride + j)]
