"""The largest magnitude of whole columns, of matrices or of token groups."""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import join8
from nybble.kernels.cuda.sources import block_bounds, load_sources, tile_maxima


@triton.jit(do_not_specialize=["tokens", "blocks"])
def column_amax(
    x_ptr,
    source_codes_ptr,
    source_scales_ptr,
    sdec_ptr,
    amax_ptr,  # int32 [lead, C] or [G, C], zeros on entry: FP32 bits, NaN above Inf
    start_ptr,
    count_ptr,
    group_ptr,
    index_ptr,
    factor_ptr,
    row_stride,
    lead_stride,
    columns,
    tokens,
    blocks,
    SOURCE: tl.constexpr,
    SDEC_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    GROUPED: tl.constexpr,
    LOOPS: tl.constexpr,
    W: tl.constexpr,
    ASM: tl.constexpr,
):
    """Tiles as in `columns.py`: a warp takes 32 tokens x 64 features, LOOPS times W tiles a program."""
    lead = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * 8 + n % 8) * 8
    first = (n // 8) % 4 * 8
    for loop in range(LOOPS):
        block = (tl.program_id(1) * LOOPS + loop) * W + n // 32
        has_block = block < blocks
        start, count = block_bounds(start_ptr, count_ptr, block, has_block, tokens, 32, GROUPED)
        inside = has_block & (column < columns)
        row = (lead * tokens + start + first).to(tl.int64)
        raws, sfs, sdecs = load_sources(
            x_ptr,
            source_codes_ptr,
            source_scales_ptr,
            sdec_ptr,
            index_ptr,
            factor_ptr,
            lead * lead_stride + (start + first).to(tl.int64) * row_stride + column,
            row_stride,
            row,
            columns,
            column,
            inside,
            first,
            count,
            SOURCE,
            SDEC_ROWS,
            SCALE_ROWS,
            HAS_INDEX,
            HAS_FACTOR,
            ASM,
        )
        maxima = tile_maxima(raws, sfs, sdecs, SOURCE, True, ASM)
        tops = ()
        for j in tl.static_range(8):
            tops = tops + (tl.max(tl.reshape(maxima[j].to(tl.int32), (W, 4, 8)), axis=1),)
        t = tl.reshape(join8(tops), (W, 64))
        c = (tl.program_id(0) * 64 + tl.arange(0, 64))[None, :]
        b = ((tl.program_id(1) * LOOPS + loop) * W + tl.arange(0, W))[:, None]
        ok = (c < columns) & (b < blocks)
        which = lead + b * 0
        if GROUPED:
            which = lead * 0 + tl.load(group_ptr + b, mask=b < blocks, other=0)
        tl.atomic_max(amax_ptr + (which * columns + c), t, mask=ok & (t > 0), sem="relaxed")
