"""What a layer keeps of an operand for its backward pass: forward codes, or the original in 16 bits, never
both.

A list of saved tensors is codes, scales and amax when wgrad.x is re-rounded from the forward value, else the
original alone; it is empty where nothing is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.kernels import fused
from nybble.layers.casting import cast, decode, encode, recast, recast_columns
from nybble.layers.operand import Codes, Draw, Values, outer, take_rows, token_scaled
from nybble.recipes import GemmTable

Saved = list[Tensor]


def from_codes(gemms: GemmTable) -> bool:
    """True when the backward pass works from forward codes."""
    return gemms.wgrad.x.source == "forward"


def kept_dtype(x: Tensor, gemms: GemmTable) -> torch.dtype:
    """In which dtype an original waits for the backward pass: 16 bits, unless wgrad takes it in FP32."""
    return x.dtype if x.element_size() == 2 or gemms.wgrad.x.format == "fp32" else torch.bfloat16


def keep(
    x: Tensor, gemms: GemmTable, wanted: bool, dtype: torch.dtype, draw: Draw, codes: Codes | None = None
) -> tuple[Values, Saved]:
    """The operand of fprop in `dtype`, and what to save of it (nothing unless `wanted`).

    `codes` are those of x where it came as codes; the backward pass then works from them.
    """
    if codes is not None or (wanted and from_codes(gemms)):
        codes = encode(x, gemms.fprop.x, -1, draw) if codes is None else codes
        values = Values(decode(codes, gemms.fprop.x, -1, x.shape, dtype), codes.amax)
        return values, list(codes) if wanted else []
    values = cast(x, gemms.fprop.x, -1, dtype, draw)
    to = kept_dtype(x, gemms)
    # torch.compile takes no second name of one tensor from a forward to a backward pass: no `to` that does
    # nothing.
    return values, [x if x.dtype == to else x.to(to)] if wanted else []


def repeatable(x: Tensor, gemms: GemmTable) -> bool:
    """True when what is kept of x gives the operand of fprop again to the last bit."""
    return from_codes(gemms) or gemms.fprop.x.format == "bf16" or kept_dtype(x, gemms) == x.dtype


def fprop_again(
    saved: Saved, gemms: GemmTable, shape: Sequence[int], dtype: torch.dtype, draw: Draw, full: bool = False
) -> Values:
    """The operand of fprop from what was saved; with `full` its outer scale is multiplied in."""
    if from_codes(gemms):
        codes = Codes(*saved)
        return Values(decode(codes, gemms.fprop.x, -1, shape, dtype, apply_outer=full), codes.amax)
    if full:
        codes = encode(saved[0], gemms.fprop.x, -1, draw)
        return Values(decode(codes, gemms.fprop.x, -1, shape, dtype, apply_outer=True), codes.amax)
    return cast(saved[0], gemms.fprop.x, -1, dtype, draw)


def wgrad_operand(
    saved: Saved,
    gemms: GemmTable,
    shape: Sequence[int],
    dtype: torch.dtype,
    draw: Draw,
    ends: Tensor | None = None,
    factor: Tensor | None = None,
) -> Values:
    """x [T, K], rows times `factor` [T], as the operand of wgrad, along T (along each group of `ends`)."""
    to = gemms.wgrad.x
    if not from_codes(gemms):
        return cast(saved[0] if factor is None else times(saved[0], factor), to, -2, dtype, draw, ends)
    fx, codes = gemms.fprop.x, Codes(*saved)
    if factor is None:
        return recast(codes, fx, -1, shape, to, -2, dtype, draw, ends)
    if ends is not None and token_scaled(fx):
        return recast_columns(codes, fx, to, dtype, draw, ends, factor)
    s = outer(codes.amax, fx)
    x = decode(codes, fx, -1, shape, torch.float32)
    return cast(x * (factor if s is None else s * factor)[:, None], to, -2, dtype, draw, ends)


def times(x: Tensor, factor: Tensor) -> Tensor:
    """Rows of x times `factor`, in x's dtype; FP16 becomes FP32, as scales of gradients lie far below it."""
    return (x.float() * factor[:, None]).to(torch.float32 if x.dtype == torch.float16 else x.dtype)


def take(saved: Saved, gemms: GemmTable, index: Tensor) -> Saved:
    """Rows of what was saved, at int32 `index`."""
    if from_codes(gemms):
        return list(take_rows(Codes(*saved), gemms.fprop.x, index))
    return [fused.gather_rows(saved[0], index, None)]
