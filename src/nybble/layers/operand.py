"""Operands of a GEMM: values without their outer scale, and the codes that a layer keeps for its backward
pass.

NVFP4 and MX values without the outer scale are exact in BF16; values of the FP8 formats include an FP32 block
scale and are rounded to BF16 where a GEMM computes in it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nybble import formats
from nybble.formats import hadamard
from nybble.formats import outer as outer_scale
from nybble.kernels import blackwell, fused, hopper
from nybble.kernels.hopper import FP8
from nybble.recipes import Operand


class Codes(NamedTuple):
    """What `nybble::quantize` returns; for bf16 and fp32 the codes are the values, in the layout of the
    tensor."""

    codes: Tensor
    scales: Tensor
    amax: Tensor


class Values(NamedTuple):
    """Values for a GEMM, and the outer amax [R], [E], [1], [] or [0] whose scale goes into its epilogue."""

    values: Any
    """A tensor, or `blackwell.Coded` or `hopper.RowScaled` where the GEMM multiplies codes."""
    amax: Tensor


class Draw(NamedTuple):
    """What names the random draws of an operand."""

    key: Tensor
    layer: int
    operand: int
    rows: Tensor | None = None


NATIVE = torch.uint8
"""The compute dtype of a GEMM that multiplies codes: its operands are never dequantised."""


def compute_dtype(
    device: torch.device, a: Operand, b: Operand, grouped: str | None = None, groups: int = 0
) -> torch.dtype:
    """In which dtype a GEMM of these operands is computed: NATIVE where the device multiplies their codes,
    FP8 where those of fp8-row, else BF16 on GPUs, FP32 on CPUs (no fast BF16 there).

    `grouped` says whether `groups` of tokens lie along the "rows" of a product or along its contraction
    ("columns").
    """
    if blackwell.chosen(device, a.format, b.format, grouped, groups):
        return NATIVE
    if hopper.chosen(device, a.format, b.format, grouped):
        return FP8
    full = device.type == "cpu" or "fp32" in (a.format, b.format)
    return torch.float32 if full else torch.bfloat16


def ends_of(offs: Tensor, spec: Operand) -> Tensor:
    """Where the groups of a wgrad operand end that `cast` made with `offs`."""
    return hadamard.transformed_ends(offs, spec.hadamard) if spec.hadamard else offs


def shape_of(shape: Sequence[int], spec: Operand, axis: int) -> list[int]:
    """Logical shape of the codes of a tensor of `shape` without groups."""
    return hadamard.transformed_shape(shape, axis, spec.hadamard, None) if spec.hadamard else list(shape)


def token_scaled(spec: Operand) -> bool:
    """NVFP4 whose outer scale is one a token, not a power of two."""
    fmt = formats.get(spec.format)
    return fmt.scale == "e4m3" and not fmt.outer_pow2 and spec.outer == "row"


def one_read(a: Operand, b: Operand) -> bool:
    """Whether a tensor that is both operands, one an axis, is rounded to nearest in one MXFP8 format."""
    fmt = formats.get(a.format)
    mx = fmt.scale == "e8m0" and not fmt.packed
    return a == b and mx and a.rounding == "nearest" and not a.hadamard


def take_rows(codes: Codes, spec: Operand, index: Tensor) -> Codes:
    """Rows of codes that were made along features: legal without a new scale since each token has its own."""
    amax = codes.amax.index_select(0, index) if spec.outer == "row" and codes.amax.numel() else codes.amax
    scales = codes.scales.index_select(0, index) if codes.scales.dim() == 2 else codes.scales
    return Codes(codes.codes.index_select(0, index), scales, amax)


def outer(amax: Tensor, spec: Operand) -> Tensor | None:
    """The outer scale S_dec, of the shape of `amax`; None for formats without one."""
    fmt = formats.get(spec.format)
    if not fmt.two_level:
        return None
    # On a GPU one launch, where plain torch takes ten.
    return fused.outer_scales(amax, fmt.name) if amax.is_cuda else outer_scale.decode_scale(fmt, amax)


def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The scale of an epilogue from those of two operands."""
    if a is None or b is None:
        return b if a is None else a
    return a * b
