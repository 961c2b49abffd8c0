"""Launches of `requantize.py`."""

import torch
from torch import Tensor

from nybble.formats.table import Format
from nybble.kernels.cuda import requantize as kernel
from nybble.kernels.cuda.column_source import Source
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import GRID_LIMIT, SCALES, Draw
from nybble.kernels.cuda.scales import E8M0_UP


def fits(
    source: Source, fmt: Format, columns: int, count: int, draw: Draw, dtype: torch.dtype | None
) -> bool:
    """Whether the kernel re-rounds a source with C = `columns` to `count` blocks of tokens of `fmt`.

    It compiles for 10 to 15 s a width, two to three times as long as that of `launch_columns.py`: too long
    for weights, which are values but no rows of experts.
    """
    return (
        source.codes is not None
        and source.scale_rows == 1
        and source.factor is None
        and draw.stochastic
        and (dtype is None or (dtype == torch.bfloat16 and draw.rows is not None))
        and columns == source.shape[2]
        and columns > 0
        and 0 < count <= GRID_LIMIT
        and count * columns < 1 << 31
        and max(source.codes.shape[-2], source.shape[1], columns) * source.shape[0] < 1 << 31
        and fmt.block_cols == kernel.BLOCK.value
        and not fmt.packed
        and SCALES[fmt.scale or "", fmt.scale_rule] == E8M0_UP.value
    )


def requantize(
    source: Source,
    columns: int,
    count: int,
    draw: Draw,
    table: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    values: Tensor | None,
) -> None:
    """Fill codes [lead, C, padded T] and scales [lead, C, blocks], or values [lead, T, C] in BF16, by the
    `block_table` of groups, if any."""
    lead, tokens, _ = source.shape
    rows = None
    if scales is not None:
        rows = torch.empty(lead, count, columns, dtype=torch.uint8, device=scales.device)
    side = 1 if codes is None else 4  # a feature's codes of four blocks fill a line of 128 bytes
    kernel.requantize_columns[(cdiv(columns, kernel.WIDTH.value) * side, cdiv(count, side), lead)](
        *source.pointers[1:],
        None if codes is None else codes.view(torch.int32),
        None if rows is None else rows.view(torch.int16),
        None if values is None else values.view(torch.int32),
        draw.key,
        draw.rows,
        *((None, None) if table is None else (table[0], table[1])),
        source.index,
        columns,
        tokens,
        count,
        draw.tag,
        COLUMNS=columns,
        SDEC_ROWS=source.row_scaled,
        VALUES=values is not None,
        HAS_ROWS=draw.rows is not None,
        HAS_INDEX=source.index is not None,
        GROUPED=table is not None,
        SIDE=side,
        ASM=use_asm(source.device),
        num_warps=1,
        maxnreg=128,  # sixteen programs a multiprocessor
        enable_fp_fusion=False,
    )
    if rows is not None:
        kernel.turn[(cdiv(columns, 128), cdiv(count, 32), lead)](
            rows, scales, count, columns, B=32, C=128, num_warps=8, enable_fp_fusion=False
        )
