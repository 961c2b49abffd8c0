"""The quantisers as torch.library custom ops in the namespace `nybble`.

The reference is their implementation on every device until a faster one registers itself:
``ops.quantize.register_kernel("cpu")``. Fake kernels give shapes alone, so that torch.compile, meta tensors
and FakeTensorMode pass. No output aliases an input and no op has a derivative: layers define their own
backward passes. Signatures and shapes: see `reference.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.formats import blocks, checks, reference
from nybble.formats import hadamard as transforms
from nybble.formats.table import Format


@torch.library.custom_op("nybble::quantize", mutates_args=())
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
    """(codes, scales, amax) of x."""
    return reference.quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)


@torch.library.custom_op("nybble::dequantize", mutates_args=())
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
    """Values of codes."""
    return reference.dequantize(codes, scales, amax, format, axis, shape, dtype, outer, apply_outer, offs)


@torch.library.custom_op("nybble::fake_quantize", mutates_args=())
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
    """(values without the outer scale, amax) of x."""
    return reference.fake_quantize(x, format, dtype, axis, rounding, outer, key, layer, operand, rows, offs)


@torch.library.custom_op("nybble::requantize", mutates_args=())
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
    """(codes, scales, amax) of codes in another format or along another axis."""
    return reference.requantize(
        codes, scales, amax, format, axis, outer, shape, to_format, to_axis,
        rounding, to_outer, key, layer, operand, rows, offs,
    )  # fmt: skip


@torch.library.custom_op("nybble::fake_requantize", mutates_args=())
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
    """(values without the outer scale, amax) of codes in another format or along another axis."""
    return reference.fake_requantize(
        codes, scales, amax, format, axis, outer, shape, to_format, to_axis, dtype,
        rounding, to_outer, key, layer, operand, rows, offs,
    )  # fmt: skip


@torch.library.custom_op("nybble::hadamard", mutates_args=())
def hadamard(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    """The Hadamard transform of x along an axis, in FP32: see `hadamard.py`."""
    return transforms.transform(x, axis, size, key, layer, operand, offs)


@hadamard.register_fake
def _(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    transforms.check_transform(x, axis, size, key, layer, operand, offs)
    shape = transforms.transformed_shape(x.shape, axis, size, _groups(offs))
    return x.new_empty(shape, dtype=torch.float32)


def _groups(offs: Tensor | None) -> int | None:
    return None if offs is None else offs.shape[0]


def empty_quantized(
    like: Tensor, fmt: Format, shape: Sequence[int], axis: int, outer: str, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    groups = _groups(offs)
    stored = blocks.stored_shape(fmt, shape, axis, groups)
    return (
        like.new_empty(blocks.code_shape(fmt, stored), dtype=blocks.code_dtype(fmt)),
        like.new_empty(blocks.scale_shape(fmt, stored), dtype=blocks.scale_dtype(fmt)),
        like.new_empty(blocks.amax_shape(fmt, shape, axis, outer, groups), dtype=torch.float32),
    )


@quantize.register_fake
def _(
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
    fmt = checks.check_quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    return empty_quantized(x, fmt, x.shape, axis, outer, offs)


@dequantize.register_fake
def _(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
    format: str,
    axis: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    outer: str = "tensor",
    apply_outer: bool = True,  # noqa: ARG001
    offs: Tensor | None = None,
) -> Tensor:
    checks.check_layout(shape, format, axis, outer, offs)
    return codes.new_empty(list(shape), dtype=dtype)


@fake_quantize.register_fake
def _(
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
    fmt = checks.check_quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    return x.new_empty(x.shape, dtype=dtype), empty_quantized(x, fmt, x.shape, axis, outer, offs)[2]


@requantize.register_fake
def _(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
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
    checks.check_layout(shape, format, axis, outer, offs)
    fmt = checks.check_layout(shape, to_format, to_axis, to_outer, offs)
    checks.check_rounding(fmt, rounding, key, layer, operand, rows, shape)
    return empty_quantized(codes, fmt, shape, to_axis, to_outer, offs)


@fake_requantize.register_fake
def _(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
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
    checks.check_layout(shape, format, axis, outer, offs)
    fmt = checks.check_layout(shape, to_format, to_axis, to_outer, offs)
    checks.check_rounding(fmt, rounding, key, layer, operand, rows, shape)
    values = codes.new_empty(list(shape), dtype=dtype)
    return values, empty_quantized(codes, fmt, shape, to_axis, to_outer, offs)[2]
