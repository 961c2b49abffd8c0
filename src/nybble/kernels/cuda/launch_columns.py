"""Launches of `columns.py`: sources described, token groups looked up, outputs padded to whole blocks."""

import torch
from torch import Tensor

from nybble.formats import blocks
from nybble.formats.table import Format
from nybble.kernels.cuda import columns as column_kernel
from nybble.kernels.cuda import groups as group_kernel
from nybble.kernels.cuda import launch_decode, launch_requantize
from nybble.kernels.cuda.column_source import TILE, Source
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import GRID_LIMIT, SCALES, Draw, pow2
from nybble.kernels.cuda.launch_whole_columns import holds_columns, measure_columns, quantize_whole_columns

WARPS = 4


def block_table(offs: Tensor, count: int, block: int, least: int = 0, ends: Tensor | None = None) -> Tensor:
    """int32 [3, count or a few more]: first row, rows and group of the padded blocks of groups that end at
    `offs`, each of `least` blocks or more.

    Where the blocks of each group end goes into `ends` (int32 [G]).
    """
    count = cdiv(count, 4) * 4  # rows of the table are 16-byte aligned
    table = torch.empty(3, count, dtype=torch.int32, device=offs.device)
    n, g = 128, offs.shape[0]
    group_kernel.block_table[(cdiv(count, n),)](
        offs,
        table,
        ends,
        count,
        g,
        LEAST=least,
        BLOCK=block,
        ENDS=ends is not None,
        N=n,
        G=pow2(g),
        enable_fp_fusion=True,
    )
    return table


def quantize_columns(
    source: Source,
    fmt: Format,
    columns: int,
    outer: int,
    amax: Tensor | None,
    offs: Tensor | None,
    draw: Draw,
    *,
    dtype: torch.dtype | None = None,
    clear_tail: bool = True,
    tiles: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantise along tokens: codes [lead, C', P] and scales [lead, C', blocks], or values [lead, T, C'].

    Where a block is a whole column, scales are [lead, C'], or [G, C'] of groups, which have one tile of TILE
    tokens or more.

    Args:
        columns: C of the logical tensor, by which draws are counted; the results have C' = C of the source.
        outer: the kernel's OUTER; `amax` is read.
        amax: outer amaxes; of whole columns their bits (int32), found here where None.
        clear_tail: rows of no group are zero; else they may hold anything.
        tiles: the `block_table` of `offs`, where it is known.
    """
    lead, tokens, width = source.shape
    whole = fmt.block_cols is None
    if whole and offs is None and dtype is None and holds_columns(lead, width):
        return quantize_whole_columns(source, columns, draw)
    block = fmt.block_cols or TILE
    count = cdiv(tokens, block) if offs is None else tokens // block + offs.shape[0]
    device = source.device
    table = tiles
    if offs is not None and tiles is None:
        table = block_table(offs, count, block, int(whole))
    codes = scales = values = None
    if dtype is None:
        per_row = count * block // (2 if fmt.packed else 1)
        codes = torch.empty(lead, width, per_row, dtype=torch.uint8, device=device)
        groups = lead if offs is None else offs.shape[0]
        shape = (groups, width) if whole else (lead, width, count)
        scales = torch.empty(shape, dtype=blocks.scale_dtype(fmt), device=device)
    else:
        values = torch.empty(lead, tokens, width, dtype=dtype, device=device)
    if whole and amax is None:
        amax = measure_columns(source, table, offs)
    if values is not None and offs is not None and clear_tail:
        launch_decode.zero_tail(values, offs)
    per_warp = 32 // (block // 8) * 8
    out_bf16 = dtype == torch.bfloat16
    if launch_requantize.fits(source, fmt, columns, count, draw, dtype):
        launch_requantize.requantize(source, columns, count, draw, table, codes, scales, values)
    elif count and width:
        column_kernel.quantize_columns[(cdiv(width, per_warp), cdiv(count, WARPS), lead)](
            *source.pointers,
            None if codes is None else codes.view(torch.int32),
            scales,
            values.view(torch.int32) if values is not None and out_bf16 else values,
            amax,
            draw.key,
            draw.rows,
            *((None,) * 3 if table is None else table),
            source.index,
            source.factor,
            *source.strides,
            width,
            columns,
            tokens,
            count,
            draw.tag,
            E2M1=fmt.packed,
            ELEMENT_MAX=fmt.element_max,
            SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
            BLOCK=block,
            WHOLE=whole,
            OUTER=outer,
            OUTER_MAX=fmt.outer_max or 0.0,
            STOCHASTIC=draw.stochastic,
            VALUES=values is not None,
            SOURCE=source.kind,
            SDEC_ROWS=source.row_scaled,
            SCALE_ROWS=source.scale_rows,
            OUT_BF16=out_bf16,
            HAS_ROWS=draw.rows is not None,
            HAS_INDEX=source.index is not None,
            HAS_FACTOR=source.factor is not None,
            GROUPED=offs is not None,
            ALIGNED=columns % 8 == 0,
            W=WARPS,
            ASM=use_asm(device),
            num_warps=WARPS,
            **(
                {"maxnreg": 128} if source.x is None and draw.stochastic else {}
            ),  # a fourth program a multiprocessor
            enable_fp_fusion=False,
        )
    if values is not None:
        return (values,)
    assert codes is not None
    assert scales is not None
    return codes, scales


def too_many(lead: int, tokens: int, block: int, groups: int) -> str | None:
    """Why a grid cannot cover so many tokens or matrices; None if it can."""
    tiles = cdiv(tokens // block + groups + 1, WARPS)
    return "more matrices or tokens than a grid has rows" if max(tiles, lead) > GRID_LIMIT else None
