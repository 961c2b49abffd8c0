"""The passes of `kernels/expert_order.py`, `expert_rows.py` and `expert_columns.py` on CUDA tensors: brought
to their kernel, or to the specification.

The layer calls them with what the kernels take; anything else is rare (no tokens, odd widths, moved storage)
and runs in plain torch on the GPU.
"""

from typing import Any

import torch
from torch import Tensor

from nybble.formats import table
from nybble.kernels import expert_columns as plain_columns
from nybble.kernels import expert_order as plain_order
from nybble.kernels import expert_rows as plain
from nybble.kernels.cuda import launch_expert_columns as by_columns
from nybble.kernels.cuda import launch_experts as launch
from nybble.kernels.cuda import launch_order as by_order
from nybble.kernels.cuda.launch_columns import too_many
from nybble.kernels.cuda.launch_decode import row_decode_scales
from nybble.kernels.cuda.launch_rows import Draw

BLOCK_TOKENS = 32


def sort_pairs(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See the specification."""
    return (by_order if by_order.fits(experts, count) else plain_order).sort_pairs(experts, count)


def count_pairs(experts: Tensor, count: int) -> Tensor:
    """See the specification."""
    return (by_order if by_order.fits(experts, count) else plain_order).count_pairs(experts, count)


def row_facts(order: Tensor, k: int, rows: Tensor | None, pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See the specification."""
    return (launch if order.numel() else plain).row_facts(order, k, rows, pairs)


def row_factors(order: Tensor, ends: Tensor, k: int, *rest: Any) -> Tensor:
    """See the specification."""
    if not order.numel() or not ends.numel():
        return plain.row_factors(order, ends, k, *rest)
    return launch.row_factors(order, ends, k, *rest)


def outer_scales(amax: Tensor, format: str) -> Tensor:
    """See the specification."""
    if not amax.numel():
        return plain.outer_scales(amax, format)
    return row_decode_scales(table.get(format), amax, "row", (amax.numel(), 1), None).view(amax.shape)


def gather_rows(x: Tensor, index: Tensor, factor: Tensor | None) -> Tensor:
    """See the specification."""
    fits = launch.bf16_rows(x) and index.numel() > 0
    return (launch if fits else plain).gather_rows(x, index, factor)


def combine_rows(x: Tensor, factor: Tensor | None, place: Tensor, ends: Tensor, k: int) -> Tensor:
    """See the specification."""
    fits = launch.bf16_rows(x) and ends.numel() > 0
    return (launch if fits else plain).combine_rows(x, factor, place, ends, k)


def quantize_to_rows(
    x: Tensor,
    format: str,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    place: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the specification."""
    if not (launch.bf16_rows(x) and launch.holds_rows(format, x.shape[1], rounding)):
        return plain.quantize_to_rows(x, format, rounding, key, layer, operand, rows, place)
    return launch.quantize_tokens(x, format, Draw.of(rounding, key, layer, operand, rows), None, None, place)


def decode_to_rows(codes: Tensor, scales: Tensor, amax: Tensor, format: str, index: Tensor) -> Tensor:
    """See the specification."""
    width = codes.shape[1] * (2 if table.get(format).packed else 1)
    if width % 16 or not index.numel():
        return plain.decode_to_rows(codes, scales, amax, format, index)
    return launch.decode_to_rows(codes, scales, format, index)


def token_tiles(offs: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """See the specification."""
    return (by_columns if offs.numel() else plain_columns).token_tiles(offs, tokens)


def requantize_rows(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    index: Tensor | None,
    to_format: str,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """See the specification."""
    fmt, to = table.get(format), table.get(to_format)
    R = codes.shape[0] if index is None else index.shape[0]
    fits = (
        fmt.scale == "e4m3" and not fmt.square and codes.shape[1] % 8 == 0 and codes.numel() and offs.numel()
    )
    fits = fits and to.scale in ("e8m0", "fp32") and to.block_cols is not None and not to.square
    if not fits or too_many(1, R, BLOCK_TOKENS, offs.shape[0]) is not None:
        return plain_columns.requantize_rows(
            codes, scales, amax, format, index, to_format, rounding, key, layer, operand, rows, offs
        )
    draw = Draw.of(rounding, key, layer, operand, rows)
    return by_columns.requantize_rows(codes, scales, amax, format, index, to_format, draw, offs, tiles)


def gradient_both(
    dy: Tensor,
    format: str,
    index: Tensor | None,
    factor: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the specification."""
    fmt = table.get(format)
    R = dy.shape[0] if index is None else index.shape[0]
    fits = launch.bf16_rows(dy) and fmt.scale == "e8m0" and not fmt.packed and R > 0 and ends.numel() > 0
    if not fits or too_many(1, R, BLOCK_TOKENS, ends.shape[0]) is not None:
        return plain_columns.gradient_both(dy, format, index, factor, ends)
    return by_columns.gradient_both(dy, format, index, factor, ends, tiles)


def fp8_columns(
    x: Tensor,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor,
    index: Tensor | None = None,
    factor: Tensor | None = None,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the specification."""
    R = x.shape[0] if index is None else index.shape[0]
    fits = x.numel() and R and offs.numel() and not too_many(1, R, BLOCK_TOKENS, offs.shape[0])
    if not fits or (factor is not None and x.dtype == torch.float16):  # which kernels read as FP32
        return plain_columns.fp8_columns(x, rounding, key, layer, operand, rows, offs, index, factor)
    draw = Draw.of(rounding, key, layer, operand, rows)
    return by_columns.fp8_columns(x, draw, offs, index, factor, tiles)


def fp8_columns_of_codes(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    index: Tensor | None,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor,
    tiles: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the specification."""
    fmt = table.get(format)
    R = codes.shape[0] if index is None else index.shape[0]
    fits = fmt.scale == "e4m3" and not fmt.square and codes.shape[1] % 8 == 0 and R and offs.numel()
    if not fits or too_many(1, R, BLOCK_TOKENS, offs.shape[0]) is not None:
        return plain_columns.fp8_columns_of_codes(
            codes, scales, amax, format, index, rounding, key, layer, operand, rows, offs, None, factor
        )
    draw = Draw.of(rounding, key, layer, operand, rows)
    return by_columns.fp8_columns_of_codes(codes, scales, amax, format, index, draw, offs, tiles, factor)


def transpose_codes(
    codes: Tensor, offs: Tensor, index: Tensor | None = None, tiles: Tensor | None = None
) -> Tensor:
    """See the specification."""
    R = codes.shape[0] if index is None else index.shape[0]
    if not _whole_words(codes) or not R or too_many(1, R, BLOCK_TOKENS, offs.shape[0]) or not offs.numel():
        return plain_columns.transpose_codes(codes, offs, index)
    return by_columns.transpose_codes(codes, offs, index, tiles)


def gradient_factors(
    codes: Tensor, scales: Tensor, order: Tensor | None = None, k: int = 1, weights: Tensor | None = None
) -> Tensor:
    """See the specification."""
    if not _whole_words(codes) or (order is not None and not order.numel()):
        return plain_columns.gradient_factors(codes, scales, order, k, weights)
    return by_columns.gradient_factors(codes, scales, order, k, weights)


def _whole_words(codes: Tensor) -> bool:
    """Whether kernels read eight codes at a time."""
    return (
        codes.numel() > 0 and codes.is_contiguous() and codes.shape[1] % 8 == 0 and codes.data_ptr() % 8 == 0
    )
