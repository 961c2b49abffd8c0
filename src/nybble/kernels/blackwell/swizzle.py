"""SWIZZLE_32_4_4: how tensor cores want block scales to lie. Not yet run on this hardware.

A scale matrix [R, C] is padded with zeros to whole tiles of 128 x 4, which follow each other row by row. In a
tile of 512 bytes, scale (r, c) is at 16 * (r % 32) + 4 * (r // 32) + c: 32 lines, each of the four scales of
rows r, r + 32, r + 64 and r + 96. With T = ceil(C / 4) tiles in a row of tiles,

    off(r, c) = ((r // 128) * T + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

Sources: cuBLAS manual, "1D block scaling factors layout"; PyTorch's `SwizzleType.SWIZZLE_32_4_4`.

Grouped GEMMs take one matrix of scales a group, one behind the other, each padded by itself. Where groups end
is only known on the device: sizes here are bounds that hold for any split, and nothing waits for the GPU.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.errors import NybbleError

ROWS, COLS = 128, 4
"""Of a tile."""
TILE = ROWS * COLS


@dataclass(frozen=True, eq=False)
class Swizzled:
    """Scales in the swizzled layout. A type of its own, since bytes do not tell it from the linear one."""

    data: Tensor
    """uint8, contiguous: [..., rows * cols], in the order of `off`."""
    rows: int
    """R padded to 128."""
    cols: int
    """C padded to 4."""


def round_up(size: int, to: int) -> int:
    """The next multiple of `to`."""
    return (size + to - 1) // to * to


def swizzle(scales: Tensor) -> Swizzled:
    """uint8 scales [..., R, C] in swizzled order, each matrix by itself."""
    tiles = _tiles(scales)
    rows, cols = tiles.shape[-4] * ROWS, tiles.shape[-3] * COLS
    return Swizzled(tiles.reshape(*scales.shape[:-2], rows * cols), rows, cols)


def unswizzle(scales: Swizzled, rows: int, cols: int) -> Tensor:
    """The linear scales [..., rows, cols], without the padding."""
    if (round_up(rows, ROWS), round_up(cols, COLS)) != (scales.rows, scales.cols):
        raise NybbleError(
            f"swizzled scales of {scales.rows} x {scales.cols} do not hold a matrix of {rows} x {cols}; "
            "pass the size that they were made from"
        )
    lead = scales.data.shape[:-1]
    tiles = scales.data.view(*lead, scales.rows // ROWS, scales.cols // COLS, 32, 4, COLS)
    return tiles.transpose(-3, -2).movedim(-4, -2).reshape(*lead, scales.rows, scales.cols)[..., :rows, :cols]


def swizzle_row_groups(scales: Tensor, ends: Tensor) -> Swizzled:
    """Scales of tokens sorted by group (the 2d-3d product): each group's rows padded to 128.

    Args:
        scales: uint8 [T, C].
        ends: int [G], where each group's rows end; rows at or beyond ends[-1] are left out.
    Returns:
        128 * (T // 128 + G) rows, which is enough for any groups; what is behind the last group is zero.
    """
    (tokens, width), groups = scales.shape, ends.shape[0]
    capacity = ROWS * (tokens // ROWS + groups)
    at, _ = _places(ends, tokens, ROWS, capacity)
    padded = scales.new_zeros(capacity + 1, width)
    padded[at] = scales
    return swizzle(padded[:capacity])


def swizzle_column_groups(scales: Tensor, ends: Tensor) -> Swizzled:
    """Scales along grouped tokens (the 2d-2d product, wgrad): each group's columns padded to 4.

    Each group is a matrix of its own, so that the tiles of a group lie together.

    Args:
        scales: uint8 [R, B].
        ends: int [G], where each group's columns end; columns at or beyond ends[-1] are left out.
    Returns:
        4 * (B // 4 + G) columns, which is enough for any groups; what is behind the last group is zero.
    """
    (rows, width), groups = scales.shape, ends.shape[0]
    capacity = COLS * (width // COLS + groups)
    at, padded_ends = _places(ends, width, COLS, capacity)
    padded = scales.new_zeros(rows, capacity + 1)
    padded[:, at] = scales
    tiles = _tiles(padded[:, :capacity])
    down, across = tiles.shape[:2]
    # Tile (i, j) of the whole goes to (i, j - start) of its group, behind all tiles of the groups before.
    # What lies behind the last group is treated as one more.
    last = torch.cat([padded_ends // COLS, padded_ends.new_full((1,), across)])
    first = torch.cat([last.new_zeros(1), last[:-1]])
    j = torch.arange(across, device=scales.device)
    group = torch.searchsorted(last, j, right=True)
    start, size = first[group], (last - first)[group]
    i = torch.arange(down, device=scales.device)[:, None]
    place = down * start + i * size + (j - start)
    data = torch.empty_like(tiles).view(down * across, TILE)
    data[place.reshape(-1)] = tiles.view(down * across, TILE)
    return Swizzled(data.view(-1), down * ROWS, capacity)


def _tiles(scales: Tensor) -> Tensor:
    """[..., R, C] to contiguous [..., ceil(R / 128), ceil(C / 4), 32, 16], the bytes of tiles in order."""
    if scales.dtype != torch.uint8:
        raise NybbleError(f"scales of {scales.dtype} cannot be swizzled; pass E4M3 or E8M0 bytes as uint8")
    rows, cols = scales.shape[-2:]
    down, across = round_up(rows, ROWS) // ROWS, round_up(cols, COLS) // COLS
    padded = F.pad(scales, (0, across * COLS - cols, 0, down * ROWS - rows))
    tiles = padded.reshape(*scales.shape[:-2], down, 4, 32, across, COLS)
    return tiles.movedim(-2, -4).transpose(-3, -2).contiguous().flatten(-2)


def _places(ends: Tensor, size: int, to: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Where each of `size` rows goes when groups are padded to multiples of `to`, and where groups then end.

    Rows of no group go to `capacity`.
    """
    ends = ends.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends])[:-1]
    padded_ends = torch.cumsum((ends - starts + to - 1) // to * to, 0)
    padded_starts = torch.cat([ends.new_zeros(1), padded_ends])[:-1]
    shift = torch.cat([padded_starts - starts, ends.new_zeros(1)])
    index = torch.arange(size, device=ends.device)
    group = torch.searchsorted(ends, index, right=True)
    return torch.where(group < ends.shape[0], index + shift[group], capacity), padded_ends
