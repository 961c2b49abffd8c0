"""The ops on CUDA tensors: arguments checked, each call brought to the kernel that serves it.

Signatures, shapes and results are those of `formats.reference`, bit for bit. What no kernel serves runs the
reference on the GPU, with one logged reason.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.formats import blocks, checks, reference
from nybble.kernels.cuda import launch_columns as by_columns
from nybble.kernels.cuda import launch_decode, reasons
from nybble.kernels.cuda.jobs import OUTER_NONE, Job, coded_source, cut, run
from nybble.kernels.cuda.launch_decode import row_decode_scales
from nybble.kernels.cuda.launch_rows import Draw
from nybble.kernels.dispatch import say_once


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
    reason = reasons.quantize(fmt, x.shape, axis, outer, offs, values=False)
    if reason is not None:
        say_once(reason)
        return reference.quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    job = Job(
        fmt=fmt,
        shape=tuple(x.shape),
        axis=axis,
        outer=outer,
        rounding=rounding,
        draw=Draw.of(rounding, key, layer, operand, rows),
        offs=offs,
    )
    codes, scales, amax = run(job, x.detach())
    return codes, scales, amax


def codes_and_values(
    weight: Tensor,
    format: str,
    rounding: str = "nearest",
    outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fused.codes_and_values`."""
    fmt = checks.check_quantize(weight, format, -1, rounding, outer, key, layer, operand, None, None)
    reason = reasons.quantize(fmt, weight.shape, -1, outer, None, values=False)
    if reason is not None or rounding == "eden" or fmt.square:
        q = quantize(weight, format, -1, rounding, outer, key, layer, operand)
        return *q, dequantize(*q, format, -1, weight.shape, torch.bfloat16, outer, False)
    job = Job(
        fmt=fmt,
        shape=tuple(weight.shape),
        axis=-1,
        outer=outer,
        rounding=rounding,
        draw=Draw.of(rounding, key, layer, operand, None),
        offs=None,
        dtype=torch.bfloat16,
        coded=True,
    )
    codes, scales, amax, values = run(job, weight.detach())
    return codes, scales, amax, values


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
    reason = reasons.quantize(fmt, x.shape, axis, outer, offs, values=True)
    if reason is not None:
        say_once(reason)
        return reference.fake_quantize(
            x, format, dtype, axis, rounding, outer, key, layer, operand, rows, offs
        )
    job = Job(
        fmt=fmt,
        shape=tuple(x.shape),
        axis=axis,
        outer=outer,
        rounding=rounding,
        draw=Draw.of(rounding, key, layer, operand, rows),
        offs=offs,
        dtype=_computed(dtype),
    )
    values, amax = run(job, x.detach())
    return values.to(dtype), amax


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
    reason = reasons.dequantize(fmt, shape, axis, offs)
    if reason is not None:
        say_once(reason)
        return reference.dequantize(codes, scales, amax, format, axis, shape, dtype, outer, apply_outer, offs)
    stored = blocks.stored_shape(fmt, tuple(shape), axis, None)
    rows, length = math.prod(stored[:-1]), stored[-1]
    code_words = codes.contiguous().view(rows, -1).view(torch.int32)
    s_dec = (
        row_decode_scales(fmt, amax, outer, tuple(stored), offs) if fmt.two_level and apply_outer else None
    )
    out = torch.empty(rows, length, dtype=_computed(dtype), device=codes.device)
    launch_decode.decode_rows(code_words, scales.contiguous(), s_dec, out, None, fmt)
    values = out.view(stored).to(dtype)
    return values.transpose(-1, -2).contiguous() if axis == -2 else values


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
    fmt = checks.check_layout(shape, format, axis, outer, offs)
    to = checks.check_layout(shape, to_format, to_axis, to_outer, offs)
    checks.check_rounding(to, rounding, key, layer, operand, rows, shape)
    if reasons.requantize(fmt, axis, to, to_axis, shape, offs) is None:
        job = Job(
            fmt=to,
            shape=tuple(shape),
            axis=to_axis,
            outer=to_outer,
            rounding=rounding,
            draw=Draw.of(rounding, key, layer, operand, rows),
            offs=offs,
        )
        parts = by_columns.quantize_columns(
            coded_source(codes, scales, amax, fmt, outer, job),
            to,
            shape[-1],
            OUTER_NONE,
            None,
            offs,
            job.draw,
        )
        return *cut(job, *parts), codes.new_empty(0, dtype=torch.float32)
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
    fmt = checks.check_layout(shape, format, axis, outer, offs)
    to = checks.check_layout(shape, to_format, to_axis, to_outer, offs)
    checks.check_rounding(to, rounding, key, layer, operand, rows, shape)
    if reasons.requantize(fmt, axis, to, to_axis, shape, offs) is None:
        job = Job(
            fmt=to,
            shape=tuple(shape),
            axis=to_axis,
            outer=to_outer,
            rounding=rounding,
            draw=Draw.of(rounding, key, layer, operand, rows),
            offs=offs,
        )
        (values,) = by_columns.quantize_columns(
            coded_source(codes, scales, amax, fmt, outer, job),
            to,
            shape[-1],
            OUTER_NONE,
            None,
            offs,
            job.draw,
            dtype=_computed(dtype),
        )
        return values.view(tuple(shape)).to(dtype), codes.new_empty(0, dtype=torch.float32)
    x = dequantize(codes, scales, amax, format, axis, shape, torch.float32, outer, True, offs)
    return fake_quantize(x, to_format, dtype, to_axis, rounding, to_outer, key, layer, operand, rows, offs)


def _computed(dtype: torch.dtype) -> torch.dtype:
    """What the kernels write of values wanted in `dtype`."""
    return dtype if dtype == torch.bfloat16 else torch.float32
