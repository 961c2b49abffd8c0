"""A checked call on its way to the kernel: arrays allocated, tiles laid out, outer amaxes measured."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nybble.formats import blocks
from nybble.formats.outer import power_of_two
from nybble.formats.table import Format
from nybble.kernels.cpu import layout
from nybble.kernels.cpu import scales as scale_rules
from nybble.kernels.cpu import tiles as tile_kernels
from nybble.kernels.cpu.blocks import SINGLE
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.source import (
    NO_BYTES,
    NO_FLOATS,
    NO_HALVES,
    NO_KEY,
    NO_ROWS,
    NO_SOURCE,
    Source,
    flat,
    shift_of,
)
from nybble.kernels.cpu.threads import split

ROW_SPAN = 2048
"""Columns worked on at a time along axis -1: scratch stays in the first-level cache."""
COLUMN_SPAN = 512
"""The same along axis -2 and for square blocks, where a tile has many rows."""
LONG_COLUMN_SPAN = 32
"""The same where one block is a whole column."""
MANY_TILES = 64
"""Above this many tiles, work is split by tiles alone."""

RULES = {
    ("e4m3", None): scale_rules.RULE_E4M3,
    ("e8m0", "up"): scale_rules.RULE_E8M0_UP,
    ("e8m0", "floor"): scale_rules.RULE_E8M0_FLOOR,
    ("fp32", None): scale_rules.RULE_FP32,
}


@dataclass(frozen=True, eq=False)
class Job:
    """A checked call: what to quantise into what. Fields are the arguments of `reference.quantize`."""

    fmt: Format
    shape: torch.Size
    axis: int
    rounding: str
    outer: str
    key: Tensor | None
    layer: int
    operand: int
    rows: Tensor | None
    offs: Tensor | None

    @property
    def stochastic(self) -> bool:
        """Whether draws are needed."""
        return self.rounding == "stochastic"


class Rows(NamedTuple):
    """The elements of a tensor, flat: float32, or BF16 as uint16 where `halves` are not empty."""

    floats: Any = NO_FLOATS
    halves: Any = NO_HALVES


def rows_of(x: Tensor) -> Rows:
    """The elements of x in row-major order."""
    if x.dtype == torch.bfloat16:
        return Rows(halves=flat(x.detach().contiguous().view(torch.int16)).view(np.uint16))
    return Rows(floats=flat(x if x.dtype == torch.float32 else x.to(torch.float32)))


def to_values(job: Job, x: Rows, source: Source, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in `dtype` without the outer scale, and the outer amax, of x or else of the source."""
    values = fresh(*job.shape)
    if job.offs is not None:  # rows of no group are zero
        values[int(layout.group_bounds(job.offs, job.shape[0])[1].max(initial=0)) :] = 0
    amax = _run(job, x, source, values=values)
    return values.to(dtype), amax


def to_codes(job: Job, x: Rows, source: Source) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and outer amax of x or else of the source."""
    fmt, groups = job.fmt, None if job.offs is None else job.offs.shape[0]
    stored = blocks.stored_shape(fmt, job.shape, job.axis, groups)
    make = torch.empty if groups is None else torch.zeros  # rows of no group, and padding, are zero
    codes = make(blocks.code_shape(fmt, stored), dtype=torch.uint8)
    scales = make(blocks.scale_shape(fmt, stored), dtype=blocks.scale_dtype(fmt))
    if groups is not None and job.axis == -1 and fmt.scale == "fp32":
        scales.fill_(1)  # the scale of a block of zeros, as rows of no group are
    amax = _run(job, x, source, codes=codes, scales=scales)
    return codes, scales, amax


def outer_amax(job: Job, x: Rows) -> Tensor:
    """The outer amax of the finite values of x, as `reference.measured` gives it to nearest rounding."""
    groups = None if job.offs is None else job.offs.shape[0]
    shape = blocks.amax_shape(job.fmt, job.shape, job.axis, job.outer, groups)
    amax = torch.zeros(shape, dtype=torch.float32)
    _measure(x, _tiles(job), job.shape[-1], job.outer == "row" and job.axis == -2, amax)
    return amax


def _tiles(job: Job) -> layout.Tiles:
    """The rows of a call that share scales, see `layout.py`."""
    fmt, down = job.fmt, job.axis == -2
    rows = job.shape[-2] if len(job.shape) > 1 else 1
    tile_rows = fmt.block_rows if fmt.square or not down else blocks.cols_of(fmt, rows)
    outer = job.outer if fmt.two_level else "tensor"
    if job.offs is None:
        return layout.plain(math.prod(job.shape[:-2]), rows, tile_rows, outer, down, job.shape[-1])
    return layout.grouped(job.offs, rows, tile_rows, outer, down)


def _run(
    job: Job,
    x: Rows,
    source: Source,
    *,
    values: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Quantise x into `values`, or into `codes` and `scales`; return the outer amax."""
    fmt, down, columns = job.fmt, job.axis == -2, job.shape[-1]
    rows = job.shape[-2] if len(job.shape) > 1 else 1
    tile_rows = fmt.block_rows if fmt.square or not down else blocks.cols_of(fmt, rows)
    outer = job.outer if fmt.two_level else "tensor"
    tiles = _tiles(job)
    groups = None if job.offs is None else job.offs.shape[0]
    amax = torch.zeros(blocks.amax_shape(fmt, job.shape, job.axis, job.outer, groups), dtype=torch.float32)
    fused = fmt.two_level and outer == "row" and not down
    if fmt.two_level and not fused:
        _measure(x, tiles, columns, outer == "row", amax)
        if fmt.outer_pow2:
            amax.copy_(power_of_two(fmt, amax))
    shift = SINGLE if down and not fmt.square else shift_of(fmt, columns)
    span = min(columns, _span(fmt, tile_rows, columns))
    width = columns if fused or (tile_rows == 1 and len(tiles) > MANY_TILES) else span
    fp32 = fmt.scale == "fp32"
    split(
        tile_kernels.quantize_tiles,
        len(tiles) * -(-columns // width),
        math.prod(job.shape),
        columns,
        width,
        span,
        tiles,
        tile_rows,
        x.floats,
        x.halves,
        source is not NO_SOURCE,
        *source.arguments(),
        source.outer,
        *_numbers(fmt),
        shift,
        fmt.four_over_six,
        fmt.outer_max or 1.0,
        flat(amax) if fmt.two_level else NO_FLOATS,
        fused,
        fmt.outer_pow2,
        outer == "row" and down,
        job.stochastic,
        key_words(job),
        _row_names(job),
        values is not None,
        NO_FLOATS if values is None else flat(values),
        down,
        NO_BYTES if codes is None else flat(codes),
        0 if codes is None else codes.shape[-1],
        NO_BYTES if scales is None or fp32 else flat(scales),
        flat(scales) if scales is not None and fp32 else NO_FLOATS,
        0 if scales is None else scales.shape[-1],
    )
    return amax


@cache
def _numbers(fmt: Format) -> tuple[int, float, int, int]:
    """The kernel's element, element_max, element_exponent and rule."""
    exponent = int(math.log2(fmt.element_max))
    return int(fmt.element == "e4m3"), fmt.element_max, exponent, RULES[fmt.scale or "", fmt.scale_rule]


def _span(fmt: Format, tile_rows: int, columns: int) -> int:
    if tile_rows == 1:
        return columns if fmt.block_cols is None else ROW_SPAN
    return LONG_COLUMN_SPAN if fmt.block_cols is None else COLUMN_SPAN


def _measure(x: Rows, tiles: layout.Tiles, columns: int, per_column: bool, amax: Tensor) -> None:
    """Outer amaxes of x [R, columns] over the rows of the tiles, into `amax`."""
    inside = int((tiles[:, 0] + tiles[:, 1]).max(initial=0))
    if not per_column:
        by_row = np.zeros(inside, np.float32)
        split(tile_kernels.amax_rows, inside, inside * columns, columns, x.floats, x.halves, by_row)
        np.maximum.at(flat(amax), np.repeat(tiles[:, 5], tiles[:, 1]), by_row)
        return
    floats = x.floats
    if x.halves.size:
        floats = flat(torch.from_numpy(x.halves.view(np.int16)).view(torch.bfloat16).to(torch.float32))
    leads, rows = amax.numel() // columns, floats.size // amax.numel()
    for lead in range(leads):
        split(
            tile_kernels.amax_columns,
            -(-columns // COLUMN_SPAN),
            rows * columns,
            COLUMN_SPAN,
            columns,
            lead * rows * columns,
            min(rows, inside),
            floats,
            flat(amax.view(leads, columns)[lead]),
        )


def key_words(job: Job) -> Any:
    """uint64 [6], see `fill_draws`."""
    if job.rounding == "nearest" or job.key is None:
        return NO_KEY
    seed, step, micro, *part = (int(v) for v in job.key.tolist())
    low = 0xFFFFFFFF
    words = [
        seed & low,
        (seed >> 32) & low,
        (micro & 0xFFFF) << 16,
        step & low,
        (job.layer << 8) | job.operand,
        part[0] if part else 0,
    ]
    return np.array(words, np.uint64)


def _row_names(job: Job) -> Any:
    if not job.stochastic or job.rows is None:
        return NO_ROWS
    return flat(job.rows.to(torch.int64))
