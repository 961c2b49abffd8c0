"""Checked calls of the quantisers on CUDA tensors, by layout: rows, columns, square blocks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.formats import blocks, eden
from nybble.formats.outer import power_of_two
from nybble.formats.table import Format
from nybble.kernels.cuda import launch_columns as by_columns
from nybble.kernels.cuda import launch_eden as by_runs
from nybble.kernels.cuda import launch_rows as by_rows
from nybble.kernels.cuda import launch_squares as by_squares
from nybble.kernels.cuda import row_source
from nybble.kernels.cuda.column_source import Source, as_source
from nybble.kernels.cuda.jit import cdiv
from nybble.kernels.cuda.launch_decode import row_decode_scales
from nybble.kernels.cuda.launch_rows import Draw
from nybble.kernels.cuda.launch_whole_columns import holds_columns

OUTER_NONE, OUTER_ROW, OUTER_GIVEN = 0, 1, 2
PER_FEATURE, PER_LEAD, PER_GROUP, ONE = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A checked call: what to quantise into what."""

    fmt: Format
    shape: tuple[int, ...]
    axis: int
    outer: str
    rounding: str
    draw: Draw
    offs: Tensor | None
    dtype: torch.dtype | None = None
    """Of the values; None for codes."""
    coded: bool = False
    """Codes and values, of rows."""

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(lead, R, C)."""
        if len(self.shape) == 1:
            return 1, 1, self.shape[0]
        return math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]

    @property
    def amax_shape(self) -> list[int]:
        """Of the outer amax."""
        groups = None if self.offs is None else self.offs.shape[0]
        return blocks.amax_shape(self.fmt, self.shape, self.axis, self.outer, groups)


def run(job: Job, x: Tensor) -> tuple[Tensor, ...]:
    """(codes, scales, amax), or (values, amax), or (codes, scales, amax, values)."""
    if job.rounding == "eden":
        return _eden(job, x)
    if job.fmt.square:
        return _square(job, x)
    return _columns(job, x) if job.axis == -2 else _rows(job, x)


def _rows(job: Job, x: Tensor) -> tuple[Tensor, ...]:
    fmt, unit, (lead, height, width) = job.fmt, row_source.unit_of(job.fmt), job.matrices
    # A row's own amax is found in the same pass, unless it is to be made a power of two first.
    in_pass = fmt.two_level and job.outer == "row" and not fmt.outer_pow2
    whole = fmt.block_cols is None or (fmt.two_level and job.outer == "row")
    flat_block = width % (fmt.block_cols or 1) == 0
    count = lead if fmt.two_level and job.outer == "matrix" else 1
    joined = None
    if not whole and flat_block and job.draw.rows is None and job.offs is None:
        joined = row_source.long_rows(x, count, unit)
    group = None
    if joined is not None:
        rows = row_source.as_rows(joined, unit)
    else:
        rows = row_source.as_rows(row_source.as_matrix(x), unit)
        if fmt.two_level and not in_pass:
            group = _row_group(job, x.device)
    amax = torch.empty(job.amax_shape, dtype=torch.float32, device=x.device)
    mode = OUTER_NONE
    if fmt.two_level:
        mode = OUTER_ROW if in_pass else OUTER_GIVEN
        if mode == OUTER_GIVEN:
            amax = _rounded(fmt, by_rows.measure(rows, job.amax_shape, group, job.offs))
    height, padded = rows.x.shape
    values = codes = scales = None
    packed = 2 if fmt.packed else 1
    if job.dtype is not None:
        values = torch.empty(height, padded, dtype=job.dtype, device=x.device)
    if job.dtype is None or job.coded:
        codes = torch.empty(height, padded // packed, dtype=torch.uint8, device=x.device)
        per_row = 1 if fmt.block_cols is None else cdiv(padded, fmt.block_cols)
        scales = torch.empty(height, per_row, dtype=blocks.scale_dtype(fmt), device=x.device)
    by_rows.quantize_rows(
        rows, fmt, mode, amax, group, job.offs, job.draw, codes=codes, scales=scales, values=values
    )
    if values is not None:
        values = values[:, : rows.columns].contiguous().view(job.shape)
    if codes is None or scales is None:
        assert values is not None
        return values, amax
    stored = blocks.stored_shape(fmt, job.shape, -1, None)
    codes = codes[:, : cdiv(rows.columns, packed)].contiguous().view(blocks.code_shape(fmt, stored))
    parts = (codes, scales.view(blocks.scale_shape(fmt, stored)), amax)
    return parts if values is None else (*parts, values)


def _rounded(fmt: Format, amax: Tensor) -> Tensor:
    """The outer amax as the format stores it."""
    return power_of_two(fmt, amax) if fmt.outer_pow2 else amax


def _row_group(job: Job, device: torch.device) -> Tensor:
    """int32: which outer amax each row has."""
    lead, height, _ = job.matrices
    if job.outer == "row":
        return torch.arange(lead * height, dtype=torch.int32, device=device)
    if job.outer == "matrix" and job.offs is not None:
        return by_rows.row_groups(job.offs, height)
    if job.outer == "matrix" and lead > 1:
        return torch.arange(lead * height, dtype=torch.int32, device=device) // height
    return torch.zeros(lead * height, dtype=torch.int32, device=device)


def _columns(job: Job, x: Tensor) -> tuple[Tensor, ...]:
    fmt, (lead, height, width) = job.fmt, job.matrices
    source = as_source(x.reshape(lead, height, width))
    amax = torch.empty(job.amax_shape, dtype=torch.float32, device=x.device)
    amax_read, mode = None, OUTER_NONE
    if fmt.two_level:
        mode = {"tensor": ONE, "row": PER_FEATURE}.get(job.outer, PER_LEAD if job.offs is None else PER_GROUP)
        amax = _rounded(fmt, _column_amax(job, x))
        if mode == PER_FEATURE and source.shape[2] != width:
            amax_read = torch.nn.functional.pad(
                amax.view(lead, width), (0, source.shape[2] - width)
            ).contiguous()
        else:
            amax_read = amax
    parts = by_columns.quantize_columns(
        source, fmt, width, mode, amax_read, job.offs, job.draw, dtype=job.dtype
    )
    if job.dtype is not None:
        return parts[0][..., :width].contiguous().view(job.shape), amax
    return *cut(job, *parts), amax


def _column_amax(job: Job, x: Tensor) -> Tensor:
    """Outer amax of values to be quantised along their tokens."""
    if job.outer == "row":
        inside = x.isfinite()
        if job.offs is not None:
            end = job.offs[-1:] if job.offs.numel() else job.offs.new_zeros(1)
            inside = inside & (torch.arange(x.shape[0], device=x.device)[:, None] < end)
        return torch.where(inside, x, 0).abs().amax(-2).float()
    count = x.shape[0] if job.outer == "matrix" and x.dim() == 3 else 1
    joined = row_source.long_rows(x, count, 16) if job.offs is None else None
    if joined is not None:
        return by_rows.measure(row_source.as_rows(joined, 16), job.amax_shape, None, None)
    rows = row_source.as_rows(row_source.as_matrix(x), 16)
    return by_rows.measure(rows, job.amax_shape, _row_group(job, x.device), job.offs)


def _eden(job: Job, x: Tensor) -> tuple[Tensor, ...]:
    group = None
    if job.axis == -1 and job.outer != "tensor":
        group = _row_group(job, x.device)
        rows = row_source.as_rows(row_source.as_matrix(x), 16)
        amax = by_rows.measure(rows, job.amax_shape, group, job.offs)
    else:
        amax = _column_amax(job, x)
    amax = _rounded(job.fmt, eden.outer_amax(amax))
    parts = by_runs.quantize_runs(
        x.reshape(job.matrices),
        job.fmt,
        job.axis,
        job.outer,
        amax,
        group if job.outer == "matrix" else None,
        job.draw,
        job.offs,
        job.dtype,
    )
    if job.dtype is not None:
        return parts[0].view(job.shape), amax
    groups = None if job.offs is None else job.offs.shape[0]
    stored = blocks.stored_shape(job.fmt, job.shape, job.axis, groups)
    codes, scales = parts
    return (
        codes.view(blocks.code_shape(job.fmt, stored)),
        scales.view(blocks.scale_shape(job.fmt, stored)),
        amax,
    )


def cut(job: Job, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Stored codes and scales of a padded source in the shapes that the op promises."""
    groups = None if job.offs is None else job.offs.shape[0]
    stored = blocks.stored_shape(job.fmt, job.shape, job.axis, groups)
    shape = blocks.code_shape(job.fmt, stored)
    width = job.shape[-1]
    codes = codes[:, :width, : shape[-1]].contiguous().view(shape)
    return codes, scales[:, :width].contiguous().view(blocks.scale_shape(job.fmt, stored))


def coded_source(codes: Tensor, scales: Tensor, amax: Tensor, fmt: Format, outer: str, job: Job) -> Source:
    """NVFP4 codes along -1 as the column kernels read them."""
    lead, _, width = job.matrices
    groups = lead if job.offs is None else job.offs.shape[0]
    zeros = None
    if job.fmt.block_cols is None and (job.offs is not None or not holds_columns(lead, width)):
        zeros = torch.empty(groups, job.shape[-1], dtype=torch.int32, device=codes.device)
    return Source(
        shape=job.matrices,
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        s_dec=row_decode_scales(fmt, amax, outer, job.shape, job.offs, zeros),
        scale_rows=fmt.block_rows,
        zeros=zeros,
    )


def _square(job: Job, x: Tensor) -> tuple[Tensor, ...]:
    fmt, (lead, height, width) = job.fmt, job.matrices
    amax = torch.empty(job.amax_shape, dtype=torch.float32, device=x.device)
    if fmt.two_level:
        amax = _column_amax(job, x)
    return *by_squares.quantize_squares(
        x.reshape(lead, height, width), fmt, amax, job.draw, job.shape, job.dtype
    ), amax
