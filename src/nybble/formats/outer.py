"""The outer FP32 scale of two-level formats: S_enc = min(outer_max / amax, FLT_MAX) and S_dec = 1 / S_enc.

S_enc is 1 where amax is 0. The amax is taken over finite values, so that one NaN does not spoil its
neighbours. What is stored is the amax; both scales are derived from it wherever they are needed, by IEEE
division.
Formats with `outer_pow2` store not the amax but the smallest outer_max * 2^-k that is not below it (FLT_MAX
at most), so that the same division gives S_enc = 2^k, exactly.
Granularity: "tensor" (one), "row" (one for each index of the other axes: one a token for activations along
features), "matrix" (one for each leading index of a 3-D tensor, or for each group of `offs`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats import grouped
from nybble.formats.fp32 import FLT_MAX, bits, divide, from_bits
from nybble.formats.table import Format

GRANULARITIES = ("tensor", "row", "matrix")


def encode_scale(fmt: Format, amax: Tensor) -> Tensor:
    """S_enc of outer amaxes, of their shape."""
    assert fmt.outer_max is not None
    s = divide(fmt.outer_max, amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (s == 0), torch.ones_like(s), s)


def decode_scale(fmt: Format, amax: Tensor) -> Tensor:
    """S_dec of outer amaxes, of their shape."""
    return divide(1.0, encode_scale(fmt, amax))


def power_of_two(fmt: Format, amax: Tensor) -> Tensor:
    """Amaxes that give powers of two as S_enc, each the smallest that is not below `amax`; 0 stays 0."""
    down = from_bits(bits(encode_scale(fmt, amax)) & 0x7F800000)
    assert fmt.outer_max is not None
    return torch.where(amax == 0, amax, divide(fmt.outer_max, down).clamp(max=FLT_MAX))


def measure(magnitudes: Tensor, axis: int, outer: str, offs: Tensor | None) -> Tensor:
    """Outer amax of the finite magnitudes |x| of a logical tensor; rows of no group are zero already."""
    if outer == "tensor":
        return _amax(magnitudes.reshape(-1))
    if outer == "row":
        return _amax(magnitudes.movedim(axis, -1))
    if offs is not None:
        rows = _amax(magnitudes)
        group = grouped.group_of_rows(offs, rows.shape[0])
        out = rows.new_zeros(offs.shape[0] + 1).scatter_reduce(0, group, rows, "amax")
        return out[:-1].clone()
    if magnitudes.dim() == 3:
        return _amax(magnitudes.flatten(1))
    return _amax(magnitudes.reshape(1, -1))


def _amax(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1)).amax(-1)  # the extra zero makes empty reductions 0


def spread(
    scale: Tensor, outer: str, shape: Sequence[int], offs: Tensor | None, where: grouped.Packing | None
) -> Tensor:
    """An outer quantity in a shape that broadcasts against the stored layout [..., R, L]."""
    if outer == "row":
        return scale.unsqueeze(-1)
    if outer == "tensor" or offs is None:
        return scale[:, None, None] if scale.dim() == 1 and len(shape) == 3 else scale
    if offs.shape[0] == 0:
        return scale.new_ones(())
    if where is not None:
        return scale[where.group.clamp(max=offs.shape[0] - 1)]
    return scale[grouped.group_of_rows(offs, shape[0]).clamp(max=offs.shape[0] - 1)][:, None]
