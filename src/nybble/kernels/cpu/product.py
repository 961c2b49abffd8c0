"""Products of FP32 matrices on a CPU, one for each group of rows: small ones, at the speed of the FMA units.

A BLAS is made for large products; those of an expert or of a head are over before its blocking pays. Here 16
columns of the right operand at a time are copied to where they lie dense, and all rows of the left one pass
along them. Each element is added over K in order, whatever rows and columns lie around it.

Legend: G groups of rows, R rows of all groups, M, N, K as in c [M, N] = a [M, K] @ b [K, N].
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.jit import helper, kernel
from nybble.kernels.cpu.source import flat
from nybble.kernels.cpu.threads import split
from nybble.kernels.cpu.tile import Floats, move, tile, transpose, vector_lanes

LANES = 2 * vector_lanes()
"""Columns of the right operand at a time: two registers."""

ROWS = 6
"""Rows of the result at a time: with two registers each, enough sums to keep both FMA units busy."""

DEPTH = 4096 // LANES
"""Most rows of the right operand at a time: LANES columns of them take half of the first cache."""

STRIP = 192
"""Most columns at a time of a left operand that lies by columns: they are copied to where they lie dense."""

LARGE = 1 << 20
"""Most numbers of a left operand that columns pass by one after the other: 4 MiB stay in the last cache."""

FEW = 2 * ROWS
"""Rows below which a BLAS is faster."""

ITEMS = 8
"""Least work items of a product, so that threads end together."""

_whole, _row = tile(ROWS, LANES), tile(1, LANES)
_block, _line = transpose(8), move(LANES)


@helper
def _dense(b: Floats, at: int, row: int, across: bool, depth: int, width: int, out: Floats, to: int) -> None:
    """`depth` rows and `width` columns of b from `at` on, to rows of LANES from out[to] on; b lies by
    columns if `across`; absent columns are zeros."""
    if not across and width == LANES:
        for k in range(depth):
            _line(b, at + k * row, out, to + k * LANES)
    elif not across:
        for k in range(depth):
            begin, here = at + k * row, to + k * LANES
            for j in range(width):
                out[here + j] = b[begin + j]
    else:
        wide, deep = width // 8 * 8, depth // 8 * 8
        for j in range(0, wide, 8):
            for k in range(0, deep, 8):
                _block(b, at + j * row + k, row, out, to + k * LANES + j, LANES)
            for i in range(j, j + 8):
                for k in range(deep, depth):
                    out[to + k * LANES + i] = b[at + i * row + k]
        for j in range(wide, width):
            for k in range(depth):
                out[to + k * LANES + j] = b[at + j * row + k]
    if width < LANES:
        for k in range(depth):
            for j in range(width, LANES):
                out[to + k * LANES + j] = np.float32(0.0)


@helper
def _copy(edge: Floats, skip: int, rows: int, width: int, c: Floats, at: int, row: int, add: bool) -> None:
    """Rows from `skip` on of a tile that lies in `edge` to c, added to it if `add`."""
    for i in range(skip, rows):
        for j in range(width):
            value = edge[i * LANES + j]
            c[at + i * row + j] = c[at + i * row + j] + value if add else value


@helper
def _along(
    a: Floats, a_at: int, a_row: int, a_step: int, b: Floats, b_at: int, c: Floats, c_at: int, c_row: int,
    M: int, width: int, depth: int, add: bool, edge: Floats,
) -> None:  # fmt: skip
    """c [M, width] (+)= a [M, depth] @ the dense columns at b[b_at]."""
    whole = M // ROWS * ROWS if width == LANES else 0
    for i in range(0, whole, ROWS):
        _whole(a, a_at + i * a_row, a_row, a_step, b, b_at, LANES, c, c_at + i * c_row, c_row, depth, add)
    i = whole
    while i < M:
        # the last rows once more together with some before them, or one by one where there are too few
        first = min(i, M - ROWS) if M >= ROWS else i
        rows, at, to = ROWS if M >= ROWS else 1, a_at + first * a_row, c_at + first * c_row
        if rows == ROWS:
            _whole(a, at, a_row, a_step, b, b_at, LANES, edge, 0, LANES, depth, False)
        else:
            _row(a, at, a_row, a_step, b, b_at, LANES, edge, 0, LANES, depth, False)
        _copy(edge, i - first, rows, width, c, to, c_row, add)
        i = first + rows


@helper
def _step(K: int) -> int:
    """Rows at a time, K in equal parts."""
    parts = max(1, (K + DEPTH - 1) // DEPTH)
    return max(1, (K + parts - 1) // parts)


@helper
def _room() -> tuple[Floats, int]:
    """Room for dense columns, and where in it a line of the cache begins."""
    room = np.empty(DEPTH * LANES + 16, dtype=np.float32)
    return room, (-room.ctypes.data % 64) // 4


@kernel
def _rows(
    first: int, last: int, a: Floats, b: Floats, ends: Any, across: bool, tall: int, N: int, K: int,
    c: Floats, add: bool,
) -> None:  # fmt: skip
    columns, edge = (N + LANES - 1) // LANES, np.empty(ROWS * LANES, dtype=np.float32)
    blocks = (a.shape[0] // K + tall - 1) // tall
    room, at = _room()
    for item in range(first, last):
        group, n = item // (columns * blocks), item % columns * LANES
        begin = (ends[group - 1] if group > 0 else 0) + item // columns % blocks * tall
        M, width = min(tall, ends[group] - begin), min(LANES, N - n)
        if M <= 0:
            continue
        step = _step(K)
        for k in range(0, K, step):
            depth = min(step, K - k)
            if across:
                _dense(b, group * N * K + n * K + k, K, True, depth, width, room, at)
            else:
                _dense(b, group * N * K + k * N + n, N, False, depth, width, room, at)
            more, to = add or k > 0, begin * N + n
            _along(a, begin * K + k, K, 1, room, at, c, to, N, M, width, depth, more, edge)


@kernel
def _columns(
    first: int, last: int, a: Floats, b: Floats, ends: Any, across: bool, strip: int, part: int,
    M: int, N: int, c: Floats, add: bool,
) -> None:  # fmt: skip
    strips, parts, R = (M + strip - 1) // strip, (N + part - 1) // part, a.shape[0] // M
    edge = np.empty(ROWS * LANES, dtype=np.float32)
    (room, at), left = _room(), np.empty(DEPTH * strip, dtype=np.float32)
    for item in range(first, last):
        group, m, left_edge = item // (strips * parts), item // parts % strips * strip, item % parts * part
        begin, right_edge = ends[group - 1] if group > 0 else 0, min(N, left_edge + part)
        K, rows, to = ends[group] - begin, min(strip, M - m), (group * M + m) * N
        if K <= 0 and not add:
            for i in range(rows):
                c[to + i * N + left_edge : to + i * N + right_edge] = np.float32(0.0)
        step, whole = _step(K), rows // LANES * LANES
        for k in range(0, K, step):
            depth = min(step, K - k)
            for i in range(depth):
                here, dense = (begin + k + i) * M + m, i * strip
                for j in range(0, whole, LANES):
                    _line(a, here + j, left, dense + j)
                for j in range(whole, rows):
                    left[dense + j] = a[here + j]
            for n in range(left_edge, right_edge, LANES):
                width, more = min(LANES, N - n), add or k > 0
                if across:
                    _dense(b, n * R + begin + k, R, True, depth, width, room, at)
                else:
                    _dense(b, (begin + k) * N + n, N, False, depth, width, room, at)
                _along(left, 0, 1, strip, room, at, c, to + n, N, rows, width, depth, more, edge)


def grouped_rows(a: Tensor, b: Tensor, ends: Tensor, across: bool, out: Tensor, add: bool = False) -> Tensor:
    """Each group's rows of a [R, K] with its matrix b [G, K, N], or [G, N, K] if `across`, into out [R, N].

    All FP32 on a CPU, `out` contiguous; ends [G] int32, where each group's rows end. Rows behind the last
    group are left alone. With `add` the products are added to what `out` holds.
    """
    G, N, K = b.shape[0], out.shape[1], a.shape[1]
    assert out.is_contiguous()
    if K == 0 or out.numel() == 0:
        return out if add else out.zero_()
    tall = max(STRIP, LARGE // K // ROWS * ROWS)
    items, work = G * -(-a.shape[0] // tall) * -(-N // LANES), a.shape[0] * N * K // 8
    split(_rows, items, work, flat(a), flat(b), flat(ends), across, tall, N, K, flat(out), add)
    return out


def grouped_columns(
    a: Tensor, b: Tensor, ends: Tensor, across: bool, out: Tensor, add: bool = False
) -> Tensor:
    """For each group out [G, M, N] = a [R, M].T @ b over its rows of b [R, N], or columns of b [N, R] if
    `across`; zeros where it has none."""
    G, M, N = out.shape
    assert out.is_contiguous()
    if out.numel() == 0:
        return out
    strips = max(1, -(-M // STRIP))
    parts = min(-(-ITEMS // (G * strips)), -(-N // LANES))
    strip, part = -(-M // strips // ROWS) * ROWS, -(-N // parts // LANES) * LANES
    items, work = G * -(-M // strip) * -(-N // part), a.shape[0] * M * N // 8
    arrays = flat(a), flat(b), flat(ends)
    split(_columns, items, work, *arrays, across, strip, part, M, N, flat(out), add)
    return out


def matmul(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """out = a [M, K] @ b [K, N], or added to what it holds; by a BLAS where there are few rows."""
    if a.shape[0] < FEW:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    return tiles(a, b, out, add)


def tiles(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """The same, in any case by the tiles above: a row has the same bits among others and alone.

    Fast where a and b or their transposes are contiguous.
    """
    across = not b.is_contiguous()
    b = b.T if across else b
    if a.is_contiguous():
        return grouped_rows(a, b[None], _one(a), across, out, add)
    return grouped_columns(a.T, b, _one(a.T), across, out[None], add)[0]


def _one(a: Tensor) -> Tensor:
    """The end of all rows as that of one group."""
    return torch.tensor([a.shape[0]], dtype=torch.int32)
