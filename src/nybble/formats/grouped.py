"""Tokens that are sorted by expert: where each group's blocks lie.

`offs` int32 [G] holds the cumulative ends of the groups, as for torch's grouped_mm. Rows at or beyond
offs[-1] belong to no group: they count as zeros. Along axis -2 (over tokens) a block never spans two groups:
group g starts at column block * sum over h < g of ceil(T_h / block) of the stored [C, P], where
P = block * (T // block + G) bounds every split of T tokens, so that shapes do not depend on data. Padding has
code 0 and scale 0. An empty group takes no block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.formats.table import Format


def group_slices(offs: Tensor) -> list[slice]:
    """The rows of each group; waits for a GPU."""
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def group_of_rows(offs: Tensor, tokens: int) -> Tensor:
    """int64 [T]: the group of each row, G for rows of none."""
    index = torch.arange(tokens, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs.contiguous(), index, right=True)


def zero_outside(x: Tensor, offs: Tensor) -> Tensor:
    """x [T, C] with the rows of no group set to zero."""
    inside = group_of_rows(offs, x.shape[0]) < offs.shape[0]
    return torch.where(inside[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the rows of a grouped [T, C] lie along the stored axis."""

    size: int
    """P."""
    column: Tensor
    """int64 [T]: the stored column of each row; P for rows of no group."""
    group: Tensor
    """int64 [P]: the group of each stored column; G where there is none."""
    used: Tensor
    """bool [P]: whether the column lies in a block of some group (short blocks are used whole)."""

    @property
    def holds(self) -> Tensor:
        """bool [P]: whether the column is that of a row, and not padding."""
        out = torch.zeros(self.size + 1, dtype=torch.bool, device=self.column.device)
        out.index_fill_(0, self.column, True)  # a scalar put at an index would be copied from the host
        return out[: self.size]


def packing(fmt: Format, offs: Tensor, tokens: int) -> Packing:
    """The layout, in blocks of `fmt`, of groups that end at `offs` over `tokens` rows."""
    return pack_blocks(fmt.block_cols or 1, offs, tokens)


def pack_blocks(block: int, offs: Tensor, tokens: int) -> Packing:
    """The same in blocks of `block` rows."""
    groups = offs.shape[0]
    size = block * (tokens // block + groups)
    ends = offs.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends])[:groups]
    padded_ends = torch.cumsum((ends - starts + block - 1) // block * block, 0)
    padded_starts = torch.cat([ends.new_zeros(1), padded_ends])[:groups]
    rows = group_of_rows(offs, tokens)
    shift = torch.cat([padded_starts - starts, ends.new_zeros(1)])
    index = torch.arange(tokens, device=offs.device)
    column = torch.where(rows < groups, index + shift[rows], size)
    group = torch.searchsorted(padded_ends, torch.arange(size, device=offs.device), right=True)
    return Packing(size=size, column=column, group=group, used=group < groups)


def pack_columns(x: Tensor, where: Packing) -> Tensor:
    """[T, C] to the stored [C, P]; padding is zero."""
    out = x.new_zeros(where.size + 1, x.shape[1])
    out[where.column] = x
    return out[: where.size].t()


def unpack_columns(stored: Tensor, where: Packing) -> Tensor:
    """[C, P] to [T, C]; rows of no group are zero."""
    padded = torch.cat([stored, stored.new_zeros(stored.shape[0], 1)], dim=1)
    return padded[:, where.column].t()
