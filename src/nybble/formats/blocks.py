"""How elements fall into blocks, and the shapes of what is stored.

Stored layout: the quantised axis is last and contiguous, [..., R, L]; along axis -2 the stored tensor is
therefore the transpose of the logical one. Blocks start at index 0 of both axes; the last one may be short.
Inside a block elements are in the row-major order of the *logical* tensor, so that square blocks are the
same, bit for bit, along either axis.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats.table import Format


def cols_of(fmt: Format, length: int) -> int:
    """Elements of a block along the quantised axis, whose length is `length`."""
    return max(length, 1) if fmt.block_cols is None else fmt.block_cols


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up; works on symbolic sizes too."""
    return (a + b - 1) // b


def capacity(fmt: Format, tokens: int, groups: int) -> int:
    """P: stored length of `tokens` rows packed along axis -2, each of `groups` groups starting a block.

    A bound that does not depend on the sizes of the groups. Pass-through formats have no blocks and keep
    [C, T].
    """
    if fmt.block_cols is None:
        return tokens
    return fmt.block_cols * (tokens // fmt.block_cols + groups)


def stored_shape(fmt: Format, shape: Sequence[int], axis: int, groups: int | None) -> list[int]:
    """[..., R, L] of a logical shape; `groups` is the number of token groups, None where there are none."""
    out = list(shape)
    if axis == -2:
        out[-1], out[-2] = out[-2], out[-1]
        if groups is not None:
            out[-1] = capacity(fmt, out[-1], groups)
    return out


def code_shape(fmt: Format, stored: Sequence[int]) -> list[int]:
    """Shape of the codes of a stored shape."""
    return [*stored[:-1], ceil_div(stored[-1], 2) if fmt.packed else stored[-1]]


def scale_shape(fmt: Format, stored: Sequence[int]) -> list[int]:
    """Shape of the block scales of a stored shape; [0] for pass-through formats."""
    if fmt.passthrough:
        return [0]
    *leading, last = stored
    if leading and fmt.square:
        leading[-1] = ceil_div(leading[-1], fmt.block_rows)
    return [*leading, 1 if fmt.block_cols is None else ceil_div(last, fmt.block_cols)]


def amax_shape(fmt: Format, shape: Sequence[int], axis: int, outer: str, groups: int | None) -> list[int]:
    """Shape of the outer amax of a logical shape; [0] for formats of one level."""
    if not fmt.two_level:
        return [0]
    if outer == "tensor":
        return []
    if outer == "row":
        return [n for i, n in enumerate(shape) if i != len(shape) + axis]
    if groups is not None:
        return [groups]
    return [shape[0]] if len(shape) == 3 else [1]


def code_dtype(fmt: Format) -> torch.dtype:
    """uint8, or the values' own type for pass-through formats."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(fmt.element, torch.uint8)


def scale_dtype(fmt: Format) -> torch.dtype:
    """uint8 for E4M3 and E8M0 bytes, else float32."""
    return torch.uint8 if fmt.scale in ("e4m3", "e8m0") else torch.float32


def fold(t: Tensor, fmt: Format, axis: int) -> Tensor:
    """[..., R, L] to [..., ceil(R / rows), ceil(L / cols), rows * cols]; zeros fill short blocks."""
    rows, cols = fmt.block_rows, cols_of(fmt, t.shape[-1])
    nr, nl = ceil_div(t.shape[-2], rows), max(ceil_div(t.shape[-1], cols), 1 if fmt.block_cols is None else 0)
    t = F.pad(t, (0, nl * cols - t.shape[-1], 0, nr * rows - t.shape[-2]))
    t = t.reshape(*t.shape[:-2], nr, rows, nl, cols).transpose(-3, -2)  # [..., nr, nl, rows, cols]
    return (t.transpose(-1, -2) if axis == -2 else t).flatten(-2)


def unfold(t: Tensor, fmt: Format, axis: int, stored: Sequence[int]) -> Tensor:
    """The inverse of `fold`, cut to the stored shape."""
    rows, cols = fmt.block_rows, cols_of(fmt, stored[-1])
    t = t.unflatten(-1, (cols, rows)).transpose(-1, -2) if axis == -2 else t.unflatten(-1, (rows, cols))
    t = t.transpose(-3, -2).flatten(-4, -3).flatten(-2)  # [..., nr * rows, nl * cols]
    return t[..., : stored[-2], : stored[-1]]
