"""Tensors, and codes of them, to operands of a GEMM: quantised, decoded, rounded again along another axis."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import nybble.kernels  # noqa: F401  (registers the fast implementations of the ops)
from nybble.formats import e4m3, grouped, hadamard
from nybble.kernels import blackwell, direct, fused, hopper
from nybble.kernels.cpu.bf16 import rounded
from nybble.kernels.cuda import launch_both
from nybble.layers.operand import FP8, NATIVE, Codes, Draw, Values, token_scaled
from nybble.recipes import Operand

SIGNS = 64
"""Added to the operand number of a product for the draws of the signs that its two operands share."""

_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformed(
    x: Tensor, spec: Operand, axis: int, draw: Draw, offs: Tensor | None = None
) -> tuple[Tensor, Draw, Tensor | None]:
    """`x`, its draws and the ends of its groups, behind the Hadamard transform of `spec` if it has one."""
    if not spec.hadamard:
        return x, draw, offs
    key = draw.key if spec.signs == "drawn" else None
    shared = SIGNS + (draw.operand & ~1)  # the two operands of a product have numbers 2n and 2n + 1
    y = direct.hadamard(x, axis, spec.hadamard, key, draw.layer, shared, offs)
    rows = draw.rows
    if offs is None:
        if rows is not None and axis == -2:
            more = torch.arange(1, y.shape[0] - x.shape[0] + 1, device=x.device)
            rows = torch.cat([rows, rows[-1:] + more])
        return y, draw._replace(rows=rows), None
    rows = hadamard.transformed_rows(rows, offs, x.shape[0], spec.hadamard)
    return y, draw._replace(rows=rows), hadamard.transformed_ends(offs, spec.hadamard)


def encode(x: Tensor, spec: Operand, axis: int, draw: Draw, offs: Tensor | None = None) -> Codes:
    """Codes of `x` along `axis`."""
    x, draw, offs = transformed(x, spec, axis, draw, offs)
    return _encode(x, spec, axis, draw, offs)


def _encode(x: Tensor, spec: Operand, axis: int, draw: Draw, offs: Tensor | None) -> Codes:
    if spec.format in _PLAIN:
        none = x.new_empty(0, dtype=torch.float32)
        return Codes(x.to(_PLAIN[spec.format]), none, none)
    return Codes(*direct.quantize(x, spec.format, axis, spec.rounding, spec.outer, *_draw(spec, draw), offs))


def decode(
    codes: Codes,
    spec: Operand,
    axis: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    apply_outer: bool = False,
) -> Any:
    """Values of codes, without the outer scale unless `apply_outer`; the codes themselves if NATIVE."""
    if spec.format in _PLAIN:
        return codes.codes.to(dtype)
    if dtype == NATIVE:
        return blackwell.coded(codes.codes, codes.scales, spec.format, tuple(shape), axis)
    if dtype == FP8:
        return hopper.row_scaled(codes.codes, codes.scales)
    out: Tensor = direct.dequantize(*codes, spec.format, axis, shape, dtype, spec.outer, apply_outer)
    return out


def cast(
    x: Tensor, spec: Operand, axis: int, dtype: torch.dtype, draw: Draw, offs: Tensor | None = None
) -> Values:
    """Values of `x` after a quantisation whose codes nobody needs."""
    x, draw, offs = transformed(x, spec, axis, draw, offs)
    if spec.format in _PLAIN:
        none = x.new_empty(0, dtype=torch.float32)
        if spec.format == "bf16" and x.device.type == "cpu" and x.dtype == dtype == torch.float32:
            return Values(rounded(x), none)
        return Values(x.to(_PLAIN[spec.format]).to(dtype), none)
    if dtype == NATIVE:
        codes = _encode(x, spec, axis, draw, offs)
        operand = blackwell.coded(codes.codes, codes.scales, spec.format, tuple(x.shape), axis, offs)
        return Values(operand, codes.amax)
    if _by_columns(spec, axis, offs):
        assert offs is not None
        stored, scales = fused.fp8_columns(x, spec.rounding, *_draw(spec, draw), offs)
        return _columns(stored, scales, offs, x.shape[0], dtype)
    if dtype == FP8:
        codes = _encode(x, spec, axis, draw, offs)
        return Values(hopper.row_scaled(codes.codes, codes.scales), codes.amax)
    return Values(
        *direct.fake_quantize(
            x, spec.format, dtype, axis, spec.rounding, spec.outer, *_draw(spec, draw), offs
        )
    )


def cast_both(x: Tensor, spec: Operand, dtype: torch.dtype) -> tuple[Values, Values]:
    """What two calls of `cast` give along -1 and along -2, on a GPU in one read, where `one_read` holds."""
    along, across = launch_both.fake_quantize_both(x, spec.format, dtype)
    none = x.new_empty(0, dtype=torch.float32)
    return Values(along, none), Values(across, none)


def recast(
    codes: Codes,
    spec: Operand,
    axis: int,
    shape: Sequence[int],
    to: Operand,
    to_axis: int,
    dtype: torch.dtype,
    draw: Draw,
    offs: Tensor | None = None,
) -> Values:
    """Values of codes brought back to FP32 and rounded again as `to` along `to_axis`."""
    if spec.format in _PLAIN:
        return cast(codes.codes, to, to_axis, dtype, draw, offs)
    columns = _by_columns(to, to_axis, offs) and not to.hadamard
    if columns and axis == -1 and token_scaled(spec):
        assert offs is not None
        return recast_columns(codes, spec, to, dtype, draw, offs)
    if to.format in _PLAIN or to.hadamard or columns:
        full = decode(codes, spec, axis, shape, torch.float32, apply_outer=True)
        return cast(full, to, to_axis, dtype, draw, offs)
    if dtype in (NATIVE, FP8):
        new, scales, amax = direct.requantize(
            *codes, spec.format, axis, spec.outer, shape, to.format, to_axis,
            to.rounding, to.outer, *_draw(to, draw), offs,
        )  # fmt: skip
        if dtype == FP8:
            return Values(hopper.row_scaled(new, scales), amax)
        return Values(blackwell.coded(new, scales, to.format, tuple(shape), to_axis, offs), amax)
    return Values(
        *direct.fake_requantize(
            *codes, spec.format, axis, spec.outer, shape, to.format, to_axis, dtype,
            to.rounding, to.outer, *_draw(to, draw), offs,
        )
    )  # fmt: skip


def recast_columns(
    codes: Codes,
    spec: Operand,
    to: Operand,
    dtype: torch.dtype,
    draw: Draw,
    offs: Tensor,
    factor: Tensor | None = None,
) -> Values:
    """Codes [T, C] of `token_scaled` operands, times `factor` [T], rounded to fp8-row along each group."""
    stored, scales = fused.fp8_columns_of_codes(
        *codes, spec.format, None, to.rounding, *_draw(to, draw), offs, None, factor
    )
    return _columns(stored, scales, offs, codes.codes.shape[0], dtype)


def _by_columns(spec: Operand, axis: int, offs: Tensor | None) -> bool:
    """fp8-row along the tokens of groups, which has ops of its own."""
    return offs is not None and axis == -2 and spec.format == hopper.FORMAT


def _columns(codes: Tensor, scales: Tensor, offs: Tensor, rows: int, dtype: torch.dtype) -> Values:
    """Values of what `nybble::fp8_columns` gave of `rows` rows."""
    none = codes.new_empty(0, dtype=torch.float32)
    _, ends = fused.token_tiles(offs, rows)
    if dtype == FP8:
        return Values(hopper.row_scaled(codes, scales, ends), none)
    starts = torch.cat([ends.new_zeros(1), ends])[:-1]
    group = grouped.group_of_rows(offs, rows)
    inside = group < offs.shape[0]
    group = group.clamp(max=offs.shape[0] - 1)
    first = torch.cat([offs.new_zeros(1), offs])[:-1]
    column = torch.arange(rows, device=offs.device) - first[group] + starts[group]
    column = torch.where(inside, column, 0)
    values = e4m3.decode(codes.t().index_select(0, column)) * scales[group]
    return Values(torch.where(inside[:, None], values, 0).to(dtype), none)


def _draw(spec: Operand, draw: Draw) -> tuple[Tensor | None, int, int, Tensor | None]:
    return (None if spec.rounding == "nearest" else draw.key, draw.layer, draw.operand, draw.rows)
