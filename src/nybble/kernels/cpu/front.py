"""The ops on CPU tensors: arguments checked and handed on.

Signatures, shapes and results are those of `formats.reference`, bit for bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.formats import checks, reference, table
from nybble.kernels.cpu import eden, rotate
from nybble.kernels.cpu.job import Job, Rows, rows_of, to_codes, to_values
from nybble.kernels.cpu.source import NO_SOURCE, Source, decoded, stored_rows


def quantize(
    x: Tensor,
    format: str,
    axis: int = -1,
    rounding: str = "nearest",
    outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.quantize`."""
    fmt = checks.check_quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    if fmt.passthrough or x.numel() == 0:
        return reference.quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    job = Job(fmt, x.shape, axis, rounding, outer, key, layer, operand, rows, offs)
    if rounding == "eden":
        return eden.quantize(job, x)
    return to_codes(job, rows_of(x), NO_SOURCE)


def fake_quantize(
    x: Tensor,
    format: str,
    dtype: torch.dtype,
    axis: int = -1,
    rounding: str = "nearest",
    outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.fake_quantize`."""
    fmt = checks.check_quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    if fmt.passthrough or x.numel() == 0:
        return reference.fake_quantize(
            x, format, dtype, axis, rounding, outer, key, layer, operand, rows, offs
        )
    job = Job(fmt, x.shape, axis, rounding, outer, key, layer, operand, rows, offs)
    if rounding == "eden":
        coded = eden.quantize(job, x)
        return decoded(*coded, fmt, axis, x.shape, outer, False, offs).to(dtype), coded[2]
    return to_values(job, rows_of(x), NO_SOURCE, dtype)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    axis: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    outer: str = "tensor",
    apply_outer: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    """See `reference.dequantize`."""
    fmt = checks.check_layout(shape, format, axis, outer, offs)
    if fmt.passthrough or math.prod(shape) == 0:
        return reference.dequantize(codes, scales, amax, format, axis, shape, dtype, outer, apply_outer, offs)
    return decoded(codes, scales, amax, fmt, axis, torch.Size(shape), outer, apply_outer, offs).to(dtype)


def hadamard(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    """See `hadamard.transform`."""
    return rotate.transform(x, axis, size, key, layer, operand, offs)


def requantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    axis: int,
    outer: str,
    shape: Sequence[int],
    to_format: str,
    to_axis: int,
    rounding: str = "nearest",
    to_outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.requantize`."""
    job = _requantize_job(format, axis, outer, shape, to_format, to_axis, rounding, to_outer, key, layer,
                          operand, rows, offs)  # fmt: skip
    source = _source(codes, scales, amax, format, axis, outer, job)
    if source is not None:
        return to_codes(job, Rows(), source)
    x = dequantize(codes, scales, amax, format, axis, shape, torch.float32, outer, True, offs)
    return quantize(x, to_format, to_axis, rounding, to_outer, key, layer, operand, rows, offs)


def fake_requantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    axis: int,
    outer: str,
    shape: Sequence[int],
    to_format: str,
    to_axis: int,
    dtype: torch.dtype,
    rounding: str = "nearest",
    to_outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.fake_requantize`."""
    job = _requantize_job(format, axis, outer, shape, to_format, to_axis, rounding, to_outer, key, layer,
                          operand, rows, offs)  # fmt: skip
    source = _source(codes, scales, amax, format, axis, outer, job)
    if source is not None:
        return to_values(job, Rows(), source, dtype)
    x = dequantize(codes, scales, amax, format, axis, shape, torch.float32, outer, True, offs)
    return fake_quantize(x, to_format, dtype, to_axis, rounding, to_outer, key, layer, operand, rows, offs)


def _requantize_job(
    format: str,
    axis: int,
    outer: str,
    shape: Sequence[int],
    to_format: str,
    to_axis: int,
    rounding: str,
    to_outer: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor | None,
) -> Job:
    size = torch.Size(shape)
    checks.check_layout(size, format, axis, outer, offs)
    to = checks.check_layout(size, to_format, to_axis, to_outer, offs)
    checks.check_rounding(to, rounding, key, layer, operand, rows, size)
    return Job(to, size, to_axis, rounding, to_outer, key, layer, operand, rows, offs)


def _source(
    codes: Tensor, scales: Tensor, amax: Tensor, format: str, axis: int, outer: str, job: Job
) -> Source | None:
    """Codes whose rows can be decoded as they are needed; None where values must be at hand beforehand."""
    fmt, to = table.get(format), job.fmt
    if job.shape.numel() == 0 or axis != -1 or fmt.passthrough or fmt.square or fmt.block_cols is None:
        return None
    if to.passthrough or to.two_level or to.block_cols is None:  # needs an amax first, or a whole column
        return None
    return stored_rows(codes, scales, amax, fmt, job.shape, axis, outer, True, job.offs)
