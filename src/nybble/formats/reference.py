"""The specification of every quantiser in plain torch: slow, exact, and the oracle of every kernel's tests.

How blocks get their scales and codes is in `encode.py`, outer scales in `outer.py`, where blocks lie in
`blocks.py` and `grouped.py`, draws in `philox.py`. A value is (code * scale), which is exact in FP32, times
S_dec, one FP32 multiplication.

Functions have the signatures of the ops in `ops.py` and take any device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.formats import blocks, checks, e2m1, e4m3, e8m0, eden, grouped, philox
from nybble.formats import outer as outer_scale
from nybble.formats.encode import encode
from nybble.formats.table import Format


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
    """Codes, block scales and outer amax of `x`.

    Args:
        x: [..., R, C] or [C], float32, bfloat16 or float16, any strides.
        format: a name of the table.
        axis: -1 or -2, along which blocks run.
        rounding: "nearest", "stochastic" or "eden"; all but the first need `key`, int64 [3] of (seed, step,
            micro).
        outer: "tensor", "row" or "matrix"; formats of one level ignore it.
        layer, operand, rows: the rest of what names a draw, see `philox.py`.
        offs: int32 [G], cumulative ends of the token groups of a 2-D x.
    Returns:
        codes uint8 [..., R, L] (L the quantised axis; two a byte for E2M1), scales uint8 or float32
        [..., R, ceil(L / block)], amax float32 (shape [0] for formats of one level).
    Raises:
        NybbleError: see `checks.py`.
    """
    fmt = checks.check_quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    x = x.detach()
    if offs is not None:
        x = grouped.zero_outside(x, offs)
    where = (
        grouped.packing(fmt, offs, x.shape[0])
        if offs is not None and axis == -2 and not fmt.passthrough
        else None
    )
    if fmt.passthrough:
        codes = _store(x, axis, where).to(blocks.code_dtype(fmt))
        return _fresh(codes), x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    x = x.to(torch.float32)
    finite = torch.isfinite(x)
    x = torch.where(finite, x, 0.0)
    bad = blocks.fold(_matrix(_store(~finite, axis, where)), fmt, axis).any(-1)
    amax = measured(fmt, x, axis, rounding, outer, offs)
    stored = _store(x, axis, where)
    shape = stored.shape
    folded = blocks.fold(_matrix(stored), fmt, axis)
    draws = None
    if rounding != "nearest":
        assert key is not None
        r = philox.draws(key, x.shape, layer, operand, rows)
        draws = blocks.fold(_matrix(_store(r, axis, where)), fmt, axis)
    per_block = None
    if fmt.two_level:
        per_block = _per_block(outer_scale.spread(amax, outer, x.shape, offs, where), fmt, x.dim(), axis)
    codes, scales = encode(fmt, folded, per_block, bad, rounding, draws)
    codes = blocks.unfold(codes, fmt, axis, _matrix(stored).shape)
    if where is not None:
        codes = torch.where(where.holds, codes, 0)  # else a block with NaN has its code in the padding too
        assert fmt.block_cols is not None
        scales = torch.where(where.used[:: fmt.block_cols], scales, 0)
    codes = codes.reshape(shape)
    if fmt.packed:
        codes = e2m1.pack(codes)
    scales = scales.reshape(blocks.scale_shape(fmt, shape))
    return _fresh(codes), _fresh(scales), _fresh(amax)


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
    """Values of codes, in the logical `shape` and in `dtype` (rounded to nearest even from FP32).

    apply_outer=False leaves S_dec out: the values are then exact in bfloat16 for NVFP4 and MX formats (but
    where an E8M0 byte below 4 makes them subnormal), and the outer scale goes to the epilogue of the GEMM.
    """
    fmt = checks.check_layout(shape, format, axis, outer, offs)
    shape = tuple(shape)
    where = None
    if offs is not None and axis == -2 and not fmt.passthrough:
        where = grouped.packing(fmt, offs, shape[0])
    stored = blocks.stored_shape(fmt, shape, axis, None if where is None or offs is None else offs.shape[0])
    if fmt.passthrough:
        return _fresh(_unstore(codes, axis, where).to(dtype))
    data = e2m1.decode(e2m1.unpack(codes, stored[-1])) if fmt.packed else e4m3.decode(codes)
    value = _matrix(data) * _expand(_decode_scale(fmt, scales), fmt, stored)
    if fmt.two_level and apply_outer:
        s_dec = outer_scale.decode_scale(fmt, amax)
        value = value * outer_scale.spread(s_dec, outer, shape, offs, where)
    return _fresh(_unstore(value.reshape(stored), axis, where).to(dtype))


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
    """Values of the quantised `x` without its outer scale, in `dtype`, and the outer amax.

    Exact in bfloat16 for NVFP4 and MX formats; FP8 values include their FP32 block scale and are rounded by
    bfloat16.
    """
    codes, scales, amax = quantize(x, format, axis, rounding, outer, key, layer, operand, rows, offs)
    return dequantize(codes, scales, amax, format, axis, x.shape, dtype, outer, False, offs), amax


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
    """Quantise the full FP32 value of codes, outer scale and all, in another format or along another axis."""
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
    """`fake_quantize` of the full FP32 value of codes."""
    x = dequantize(codes, scales, amax, format, axis, shape, torch.float32, outer, True, offs)
    return fake_quantize(x, to_format, dtype, to_axis, rounding, to_outer, key, layer, operand, rows, offs)


def measured(fmt: Format, x: Tensor, axis: int, rounding: str, outer: str, offs: Tensor | None) -> Tensor:
    """The outer amax that is stored for finite values x, [0] for formats of one level."""
    if not fmt.two_level:
        return x.new_empty(0)
    amax = outer_scale.measure(x.abs(), axis, outer, offs)
    if rounding == "eden":
        amax = eden.outer_amax(amax)
    return outer_scale.power_of_two(fmt, amax) if fmt.outer_pow2 else amax


def _decode_scale(fmt: Format, scales: Tensor) -> Tensor:
    if fmt.scale == "e4m3":
        return e4m3.decode(scales)
    return e8m0.decode(scales) if fmt.scale == "e8m0" else scales


def _per_block(per_element: Tensor, fmt: Format, dims: int, axis: int) -> Tensor:
    """An outer quantity spread over [..., R, L], spread over blocks: none mixes two of its values."""
    if per_element.dim() == 0 or (per_element.dim() == 1 and per_element.shape[0] == 1):
        return per_element.reshape(())
    if axis == -2 and dims == 2 and per_element.dim() == 1:  # one a stored column, of grouped tokens
        return per_element[:: fmt.block_cols]
    return per_element


def _expand(scales: Tensor, fmt: Format, stored: Sequence[int]) -> Tensor:
    """Block scales, repeated to the elements of the stored shape."""
    rows, length = (stored[-2] if len(stored) > 1 else 1), stored[-1]
    scales = _matrix(scales).repeat_interleave(blocks.cols_of(fmt, length), -1)
    return scales.repeat_interleave(fmt.block_rows, -2)[..., :rows, :length]


def _matrix(t: Tensor) -> Tensor:
    return t if t.dim() > 1 else t.unsqueeze(0)


def _fresh(t: Tensor) -> Tensor:
    """A dense copy: ops may not return an input; `contiguous` keeps the strides of empty tensors."""
    return t.clone(memory_format=torch.contiguous_format)


def _store(x: Tensor, axis: int, where: grouped.Packing | None) -> Tensor:
    """Logical to stored layout, as a view or a copy."""
    if where is not None:
        return grouped.pack_columns(x, where)
    return x.transpose(-1, -2) if axis == -2 else x


def _unstore(stored: Tensor, axis: int, where: grouped.Packing | None) -> Tensor:
    if where is not None:
        return grouped.unpack_columns(stored, where)
    return stored.transpose(-1, -2) if axis == -2 else stored
