"""The Hadamard transform of an operand, which spreads an outlier over its run before it is quantised.

Along an axis each run of `size` values x (a short one is filled up with zeros) becomes, all in FP32::

    v[i] = x[i] * s[i]                                                signs +-1
    for h = 1, 2, 4, ... size / 2, for each i whose bit h is not set:
        v[i], v[i + h] = v[i] + v[i + h], v[i] - v[i + h]
    y[i] = v[i] * fp32(size^-1/2)                                     1/4 for 16, 1/8 for 64

This is y = H diag(s) x with Sylvester's H / sqrt(size), an orthogonal matrix: where both operands of a
product are transformed along the summed axis with the same signs, the product stays the same. Signs: the
fixed vector of TransformerEngine (16 values, repeated in longer runs), or drawn: s[i] is -1 where the draw
of element i of a tensor [size] (see `philox.py`, micro-batch 0) is odd.

With `offs` runs along axis -2 begin anew at each token group: group g begins at row
size * sum over h < g of ceil(T_h / size) of the size * (T // size + G) rows of the result; other rows are
zero.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.errors import NybbleError
from nybble.formats import grouped, philox
from nybble.formats.checks import DTYPES
from nybble.formats.philox import check_range

SIZES = (16, 32, 64, 128)
FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_NEGATIVE = sum(1 << i for i, sign in enumerate(FIXED_SIGNS) if sign < 0)
"""Which of them are negative, a bit each."""


def transform(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    """The transform of `x` along `axis`, in FP32; the axis grows to whole runs.

    Args:
        x: [..., R, C] or [C], float32, bfloat16 or float16, any strides.
        axis: -1 or -2.
        size: one of SIZES.
        key, layer, operand: what drawn signs are drawn from; key None takes the fixed signs.
        offs: int32 [G], cumulative ends of the token groups of a 2-D x; with axis -2 only.
    Raises:
        NybbleError: for arguments that do not fit.
    """
    check_transform(x, axis, size, key, layer, operand, offs)
    x = x.detach().to(torch.float32)
    if offs is not None:
        x = grouped.pack_columns(grouped.zero_outside(x, offs), grouped.pack_blocks(size, offs, x.shape[0]))
    elif axis == -2:
        x = x.transpose(-1, -2)
    v = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)) * signs(
        size, x.device, key, layer, operand
    )
    h = 1
    while h < size:
        a, b = v.unflatten(-1, (-1, 2, h)).unbind(-2)
        v = torch.stack([a + b, a - b], -2).flatten(-3)
        h *= 2
    y = (v * factor(size)).flatten(-2)
    return (y.transpose(-1, -2) if axis == -2 else y).contiguous()


def signs(size: int, device: torch.device, key: Tensor | None, layer: int, operand: int) -> Tensor:
    """float32 [size], +-1."""
    if key is None:
        # Not from a tensor of the host's: a CUDA graph cannot capture the wait for its copy.
        place = torch.arange(size, device=device) % len(FIXED_SIGNS)
        return 1.0 - 2.0 * ((_NEGATIVE >> place) & 1).to(torch.float32)
    shared = F.pad(key[:2], (0, 1))  # weights serve all micro-batches, and their parts have the same signs
    return 1.0 - 2.0 * (philox.draws(shared, (size,), layer, operand) & 1).to(torch.float32)


def factor(size: int) -> float:
    """size^-1/2 as the nearest FP32 number."""
    return float(np.float32(size**-0.5))


def transformed_shape(shape: Sequence[int], axis: int, size: int, groups: int | None) -> list[int]:
    """Shape of the transform of a tensor of `shape`, in `groups` token groups or none."""
    out = list(shape)
    n = out[axis]
    out[axis] = (n + size - 1) // size * size if groups is None else size * (n // size + groups)
    return out


def transformed_ends(offs: Tensor, size: int) -> Tensor:
    """int32 [G]: where the groups that end at `offs` end in the transform."""
    lengths = torch.diff(offs, prepend=offs.new_zeros(1))
    return (torch.cumsum((lengths + size - 1) // size, 0) * size).to(torch.int32)


def transformed_rows(rows: Tensor | None, offs: Tensor, tokens: int, size: int) -> Tensor:
    """int64: what each row of a grouped transform counts as in random draws.

    Its place in the run, behind `size` times what the first token of the run counts as: tokens keep their
    draws on whichever rank an expert lives.
    """
    where = grouped.pack_blocks(size, offs, tokens)
    names = torch.arange(tokens, device=offs.device) if rows is None else rows.to(torch.int64)
    placed = names.new_zeros(where.size + 1)
    placed[where.column] = names
    first = placed[: where.size].unflatten(0, (-1, size))[:, :1]
    return (first * size + torch.arange(size, device=offs.device)).flatten()


def check_transform(
    x: Tensor, axis: int, size: int, key: Tensor | None, layer: int, operand: int, offs: Tensor | None
) -> None:
    """NybbleError unless the arguments of `transform` fit together."""
    if x.dtype not in DTYPES:
        raise NybbleError(
            f"can transform float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
        )
    if size not in SIZES:
        raise NybbleError(
            f"a Hadamard transform has one of the sizes {', '.join(map(str, SIZES))}, not {size}"
        )
    if axis not in (-1, -2) or -axis > x.dim():
        raise NybbleError(f"axis must be -1 or -2 and exist in a tensor of {x.dim()} dimensions, not {axis}")
    if offs is not None and (x.dim() != 2 or axis != -2 or offs.dim() != 1 or offs.dtype != torch.int32):
        raise NybbleError(
            "offs must be int32 of one dimension and goes with a tensor [tokens, features], axis -2"
        )
    if key is not None:
        check_range("layer", layer)
        check_range("operand", operand)
