"""Tiles: which rows share scales, and where their codes, scales and outer amax lie. See `tiles.py`."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

Tiles = npt.NDArray[np.int64]


def _tiles(*columns: npt.NDArray[np.int64]) -> Tiles:
    return np.ascontiguousarray(np.stack(columns, 1), np.int64)


@lru_cache(maxsize=16)
def plain(leads: int, rows: int, tile_rows: int, outer: str, down: bool, columns: int) -> Tiles:
    """Tiles of [leads, rows, columns], an amax by tensor, row or matrix; `down`: blocks run over rows."""
    per_lead = (rows + tile_rows - 1) // tile_rows
    lead, index = (a.reshape(-1) for a in np.indices((leads, per_lead)))
    position = index * tile_rows
    start = lead * rows + position
    if outer == "row":
        amax = lead * columns if down else start
    else:
        amax = lead if outer == "matrix" else np.zeros_like(lead)
    scale = index if down else np.arange(lead.size)
    return _tiles(start, np.minimum(tile_rows, rows - position), lead, position, scale, amax)


def group_bounds(offs: Tensor, tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and one past the last row of each group, within the tensor whatever `offs` holds."""
    ends = np.maximum.accumulate(np.clip(offs.detach().numpy().astype(np.int64), 0, tokens))
    return np.concatenate([np.zeros(1, np.int64), ends])[: ends.size], ends


def grouped(offs: Tensor, tokens: int, tile_rows: int, outer: str, down: bool) -> Tiles:
    """Tiles of token groups, which restart at each group."""
    starts, ends = group_bounds(offs, tokens)
    tiles = (ends - starts + tile_rows - 1) // tile_rows
    index = np.arange(int(tiles.sum()))
    group = np.repeat(np.arange(ends.size), tiles)
    start = starts[group] + (index - (np.cumsum(tiles) - tiles)[group]) * tile_rows
    zero = np.zeros_like(index)
    amax = group if outer == "matrix" else start if outer == "row" and not down else zero
    return _tiles(start, np.minimum(tile_rows, ends[group] - start), zero, index * tile_rows, index, amax)
