"""Operands of experts whose blocks run along each expert's tokens: in plain torch, what a GPU's kernels do.

Legend, rounding and what kernels must equal: see `expert_rows.py`.
"""

import torch
from torch import Tensor

from nybble.formats import e4m3, ops, outer, table
from nybble.formats.grouped import group_slices

TILE = 32
"""Tokens of a tile; what is stored of a group begins with one."""


def token_tiles(offs: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """What passes along the tokens of groups share: (tiles int32 [3, N], ends int32 [G]).

    N is tokens // 32 + G, up to a multiple of 4. A group has max(1, ceil(T_g / 32)) tiles: their first token,
    tokens and group. Tiles behind those have first 0, -1 tokens and the last group. Columns of `fp8_columns`
    that are group g's end at ends[g].
    """
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    each = ((sizes + TILE - 1) // TILE).clamp(min=1)
    last = torch.cumsum(each, 0)
    groups = offs.shape[0]
    tile = torch.arange(-(-(tokens // TILE + groups) // 4) * 4, device=offs.device)
    group = torch.searchsorted(last, tile, right=True)
    used = group < groups
    group = group.clamp(max=groups - 1)
    first = (offs - sizes)[group] + (tile - (last - each)[group]) * TILE
    count = (offs[group] - first).clamp(max=TILE)
    tiles = [torch.where(used, first, 0), torch.where(used, count, -1), group]
    return torch.stack(tiles).to(torch.int32), (last * TILE).to(torch.int32)


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
    tiles: Tensor | None = None,  # noqa: ARG001 -- saves kernels work
) -> Tensor:
    """BF16 values [R, C] of codes (outer scale one a row) rounded again along each expert's rows.

    `index` int32 [R] names the row of the codes of each row; its own where None. `tiles` are those that
    `token_tiles` gives, where they are known.
    """
    if index is not None:
        codes, scales, amax = (t.index_select(0, index) for t in (codes, scales, amax))
    shape = [codes.shape[0], codes.shape[1] * (2 if table.get(format).packed else 1)]
    values, _ = ops.fake_requantize(
        codes, scales, amax, format, -1, "row", shape, to_format, -2, torch.bfloat16,
        rounding, "matrix", key, layer, operand, rows, offs,
    )  # fmt: skip
    return values


def gradient_both(
    dy: Tensor,
    format: str,
    index: Tensor | None,
    factor: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None = None,  # noqa: ARG001 -- saves kernels work
) -> tuple[Tensor, Tensor]:
    """BF16 values of the rows of dy quantised along the features, and along each expert's rows; to nearest.

    Args:
        dy: [T, C]; row r is dy[index[r]], or dy[r] without an index (int32 [R]).
        factor: FP32 [R], by which rows are multiplied (and rounded to dy's dtype) for the second result.
        tiles: those that `token_tiles` gives, where they are known.
    """
    rows = dy if index is None else dy.index_select(0, index)
    along, _ = ops.fake_quantize(rows, format, torch.bfloat16, -1, offs=ends)
    rows = rows if factor is None else (rows.float() * factor[:, None]).to(dy.dtype)
    across, _ = ops.fake_quantize(rows, format, torch.bfloat16, -2, offs=ends)
    return along, across


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
    tiles: Tensor | None = None,  # noqa: ARG001 -- saves kernels work
) -> tuple[Tensor, Tensor]:
    """Rows of x in fp8-row along each group's: codes uint8 [C, P], scales FP32 [G, C].

    Group g begins at column 32 * sum over h < g of max(1, ceil(T_h / 32)) of P = 32 * (R // 32 + G); padding
    has code 0.

    Args:
        x: [T, C]; row r is x[index[r]], or x[r] without an index (int32 [R]).
        factor: FP32 [R], by which rows are multiplied, and rounded to x's dtype.
        tiles: those that `token_tiles` gives, where they are known.
    """
    x = x if index is None else x.index_select(0, index)
    x = x if factor is None else (x.float() * factor[:, None]).to(x.dtype)
    return _columns(x, None, rounding, key, layer, operand, rows, offs)


def _columns(
    x: Tensor,
    top: Tensor | None,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor,
) -> tuple[Tensor, Tensor]:
    """`fp8_columns` of x [R, C] by the amax of the columns of `top` [R, C], which is that of x or above."""
    R, C = x.shape
    codes = torch.zeros(R, C, dtype=torch.uint8, device=x.device)
    scales = torch.ones(offs.shape[0], C, device=x.device)
    names = torch.arange(R, device=x.device) if rows is None else rows
    for g, own in enumerate(group_slices(offs)):
        size = own.stop - own.start
        if size > 0:
            values, named = x[own], names[own]
            if top is not None:  # one row more, of the amaxes, decides the scales
                values = torch.cat([values, top[own].abs().amax(0).to(x.dtype)[None]])
                named = torch.cat([named, named[:1]])
            part, scale, _ = ops.quantize(
                values, "fp8-row", -2, rounding, "tensor", key, layer, operand, named
            )
            codes[own] = part[:, :size].t()
            scales[g] = scale[:, 0]
    return transpose_codes(codes, offs), scales


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
    tiles: Tensor | None = None,  # noqa: ARG001 -- saves kernels work
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same of NVFP4 codes along the features (outer scale one a row); row r is row index[r] of the codes,
    whose outer scale is multiplied by factor[r] (FP32).

    The amax of a column is not looked for in its codes: it is what 6, the largest, would stand for in the
    largest block that the column goes through. That is a few times as much, and E4M3 has exponents to spare:
    a code that is not 0 stands for a twelfth of what 6 does.
    """
    if index is not None:
        codes, scales, amax = (t.index_select(0, index) for t in (codes, scales, amax))
    fmt = table.get(format)
    shape = [codes.shape[0], codes.shape[1] * (2 if fmt.packed else 1)]
    s = outer.decode_scale(fmt, amax)
    s = (s if factor is None else s * factor)[:, None]
    x = ops.dequantize(codes, scales, amax, format, -1, shape, torch.float32, "row", False) * s
    top = (e4m3.decode(scales) * fmt.element_max * s.abs()).repeat_interleave(16, 1)[:, : shape[1]]
    return _columns(x, top, rounding, key, layer, operand, rows, offs)


def transpose_codes(
    codes: Tensor,
    offs: Tensor,
    index: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001 -- saves kernels work
) -> Tensor:
    """Codes uint8 [T, C] of rows as columns [C, P], where `fp8_columns` puts those of each group.

    Row r is codes[index[r]], or codes[r] without an index (int32 [R]).
    """
    codes = codes if index is None else codes.index_select(0, index)
    R, C = codes.shape
    starts = [0, *token_tiles(offs, R)[1].tolist()]
    out = torch.zeros(C, TILE * (R // TILE + offs.shape[0]), dtype=torch.uint8, device=codes.device)
    for start, own in zip(starts[:-1], group_slices(offs), strict=True):
        out[:, start : start + own.stop - own.start] = codes[own].t()
    return out


def gradient_factors(
    codes: Tensor, scales: Tensor, order: Tensor | None = None, k: int = 1, weights: Tensor | None = None
) -> Tensor:
    """FP32 [R]: by what wgrad multiplies the rows of x if it takes codes uint8 [T, C] (fp8-row) of dy.

    That is the scale [T] of dy's row order[r] // k, times weights[order[r]] (FP32 [R]); without `order` the
    scale of row r. A row of zeros, whose scale is 1, has 0: it must not count in the amax of x's columns.
    """
    s = torch.where((scales != 1) | (codes & 0x7F != 0).any(-1), scales, 0)
    if order is None:
        return s
    pair = order.long()
    return s[pair // k] if weights is None else weights[pair] * s[pair // k]
