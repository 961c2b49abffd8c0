"""The Hadamard transform: see `nybble.formats.hadamard`, whose bits it gives."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.formats import hadamard
from nybble.kernels.cpu import layout
from nybble.kernels.cpu.bits import F32, U32, U64, as_float
from nybble.kernels.cpu.jit import helper, kernel
from nybble.kernels.cpu.job import rows_of
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.source import flat
from nybble.kernels.cpu.threads import split

SPAN = 64
"""Columns worked on at a time along axis -2: loads are contiguous, and a run of 128 fits the first cache."""


def transform(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    """See `hadamard.transform`."""
    hadamard.check_transform(x, axis, size, key, layer, operand, offs)
    groups = None if offs is None else offs.shape[0]
    shape = hadamard.transformed_shape(x.shape, axis, size, groups)
    if x.numel() == 0 or groups == 0:
        return torch.zeros(shape, dtype=torch.float32)
    y = fresh(*shape)
    signs = flat(hadamard.signs(size, x.device, key, layer, operand))
    source, columns, factor = rows_of(x), x.shape[-1], hadamard.factor(size)
    common = (source.floats, source.halves, signs, factor, flat(y))
    if axis == -1:
        rows = x.numel() // columns
        split(transform_rows, rows, x.numel(), columns, shape[-1], size, *common)
    else:
        runs = _runs(x.shape, size, offs)
        strips = -(-columns // SPAN)
        split(transform_columns, len(runs) * strips, x.numel(), columns, strips, size, runs, *common)
    return y


def _runs(shape: torch.Size, size: int, offs: Tensor | None) -> Any:
    """int64 [n, 2]: first row and number of rows of the source of each run of the result."""
    rows = shape[-2]
    if offs is None:
        leads = shape[:-2].numel()
        first = np.arange(0, rows, size)
        counts = np.minimum(size, rows - first)
        starts = (np.arange(leads)[:, None] * rows + first).reshape(-1)
        return np.stack([starts, np.tile(counts, leads)], 1)
    tiles = layout.grouped(offs, rows, size, "tensor", True)
    runs = np.zeros((rows // size + offs.shape[0], 2), np.int64)  # those of no group stay zero
    runs[: len(tiles)] = tiles[:, :2]
    return runs


@helper
def butterfly(v: Any, size: int, width: int) -> None:
    """H v of v [size, width], flat, in place."""
    h = 1
    while h < size:
        step = h * width
        for base in range(0, size * width, 2 * step):
            for i in range(step):
                a, b = v[U64(base + i)], v[U64(base + step + i)]
                v[U64(base + i)] = a + b
                v[U64(base + step + i)] = a - b
        h *= 2


@helper
def read(x: Any, halves: Any, at: int) -> Any:
    """Element `at`, of float32 or, if there are any, of BF16 `halves`."""
    return as_float(U32(U32(halves[U64(at)]) << U32(16))) if halves.size else x[U64(at)]


@kernel
def transform_rows(
    first: int,
    last: int,
    columns: int,
    padded: int,
    size: int,
    x: Any,
    halves: Any,
    signs: Any,
    factor: float,
    y: Any,
) -> None:
    """Rows first .. last - 1 of x [R, columns], flat, to y [R, padded], along the row."""
    v = np.empty(size, np.float32)
    for r in range(first, last):
        for low in range(0, padded, size):
            n = min(size, columns - low)
            for i in range(size):
                v[i] = (read(x, halves, r * columns + low + i) if i < n else F32(0)) * signs[i]
            butterfly(v, size, 1)
            for i in range(size):
                y[U64(r * padded + low + i)] = v[i] * F32(factor)


@kernel
def transform_columns(
    first: int,
    last: int,
    columns: int,
    strips: int,
    size: int,
    runs: Any,
    x: Any,
    halves: Any,
    signs: Any,
    factor: float,
    y: Any,
) -> None:
    """Work items first .. last - 1, each SPAN columns of one run [n, 2] of rows, to y [n * size, columns]."""
    v = np.empty(size * SPAN, np.float32)
    for item in range(first, last):
        run = item // strips
        low = (item - run * strips) * SPAN
        width = min(SPAN, columns - low)
        start, count = runs[run, 0], runs[run, 1]
        for i in range(size):
            for c in range(width):
                value = read(x, halves, (start + i) * columns + low + c) if i < count else F32(0)
                v[U64(i * width + c)] = value * signs[i]
        butterfly(v, size, width)
        for i in range(size):
            for c in range(width):
                y[U64((run * size + i) * columns + low + c)] = v[U64(i * width + c)] * F32(factor)
