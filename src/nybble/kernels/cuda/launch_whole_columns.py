"""Launches for FP8 whole columns: of matrices, or amaxes of matrices and token groups."""

import torch
from torch import Tensor

from nybble.kernels.cuda import column_amax, whole_columns
from nybble.kernels.cuda.column_source import TILE, Source
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import ENOUGH_PROGRAMS, Draw, pow2

WHOLE_WARPS = 8
ENOUGH_COLUMNS = 128
"""Programs that hold whole columns, from which on they are chosen: as many as an H200 has multiprocessors."""
AMAX_WARPS = 4
AMAX_LOOPS = 4
"""Tiles that a warp goes through at most for the amax of columns."""
BOUND_TILES, BOUND_BLOCKS = 4, 32
"""Tiles, and block scales of a row, of a program that bounds it."""


def holds_columns(lead: int, width: int) -> bool:
    """Whether programs that each hold 64 whole columns of a matrix are enough to fill a GPU."""
    return lead * cdiv(width, 64) >= ENOUGH_COLUMNS


def quantize_whole_columns(source: Source, columns: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """FP8 codes [lead, C', P] and scales [lead, C'] of the whole columns of matrices."""
    lead, tokens, width = source.shape
    count = cdiv(tokens, TILE)
    codes = torch.empty(lead, width, count * TILE, dtype=torch.uint8, device=source.device)
    scales = torch.empty(lead, width, dtype=torch.float32, device=source.device)
    whole_columns.quantize_whole_columns[(cdiv(width, 64), lead)](
        *source.pointers,
        codes.view(torch.int32),
        scales,
        draw.key,
        draw.rows,
        *source.strides,
        width,
        columns,
        tokens,
        count,
        draw.tag,
        STOCHASTIC=draw.stochastic,
        SOURCE=source.kind,
        SDEC_ROWS=source.row_scaled,
        SCALE_ROWS=source.scale_rows,
        HAS_ROWS=draw.rows is not None,
        ALIGNED=columns % 8 == 0,
        W=WHOLE_WARPS,
        ASM=use_asm(source.device),
        num_warps=WHOLE_WARPS,
        maxnreg=128,  # two programs a multiprocessor
        enable_fp_fusion=False,
    )
    return codes, scales


def bound_columns(source: Source, table: Tensor) -> Tensor:
    """int32 bits [G, C] of what `measure_columns` gives at most of NVFP4 codes, from their block scales."""
    assert source.zeros is not None
    groups, width = source.zeros.shape
    count = source.shape[1] // TILE + groups
    blocks = min(BOUND_BLOCKS, pow2(cdiv(width, 16)))
    column_amax.column_bounds[(cdiv(width, 16 * blocks), cdiv(count, BOUND_TILES))](
        source.scales,
        source.s_dec,
        source.zeros,
        *table,
        source.index,
        source.factor,
        width,
        count,
        HAS_INDEX=source.index is not None,
        HAS_FACTOR=source.factor is not None,
        CB=blocks,
        W=BOUND_TILES,
        ASM=use_asm(source.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return source.zeros


def measure_columns(source: Source, table: Tensor | None, offs: Tensor | None) -> Tensor:
    """int32 bits of the amax of whole columns: [lead, C], or [G, C] of groups."""
    lead, tokens, width = source.shape
    groups = lead if offs is None else offs.shape[0]
    amax = source.zeros
    if amax is None:
        amax = torch.zeros(groups, width, dtype=torch.int32, device=source.device)
    count = cdiv(tokens, TILE) if offs is None else tokens // TILE + groups
    per_warp = 32 // (TILE // 8) * 8
    programs = cdiv(width, per_warp) * cdiv(count, AMAX_WARPS) * lead
    loops = min(AMAX_LOOPS, pow2(programs // ENOUGH_PROGRAMS))
    if count and width:
        column_amax.column_amax[(cdiv(width, per_warp), cdiv(count, AMAX_WARPS * loops), lead)](
            *source.pointers,
            amax,
            *((None,) * 3 if table is None else table),
            source.index,
            source.factor,
            *source.strides,
            width,
            tokens,
            count,
            SOURCE=source.kind,
            SDEC_ROWS=source.row_scaled,
            SCALE_ROWS=source.scale_rows,
            HAS_INDEX=source.index is not None,
            HAS_FACTOR=source.factor is not None,
            GROUPED=offs is not None,
            LOOPS=loops,
            W=AMAX_WARPS,
            ASM=use_asm(source.device),
            num_warps=AMAX_WARPS,
            enable_fp_fusion=False,
        )
    return amax
