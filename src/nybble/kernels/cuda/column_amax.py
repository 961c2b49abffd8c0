"""The largest magnitude of whole columns, of matrices or of token groups.

Tiles as in `columns.py`: a warp takes 32 tokens x 64 features at a time.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import join8, umax
from nybble.kernels.cuda.sources import block_bounds, load_sources, tile_maxima


@triton.jit
def add_maxima(amax_ptr, matrix, maxima, columns, inside, H: tl.constexpr, L: tl.constexpr):
    """The maxima of H x L lanes of eight threads, over L, into the rows `matrix` [H, 1] of amaxes."""
    tops = ()
    for j in tl.static_range(8):
        tops = tops + (tl.max(tl.reshape(maxima[j].to(tl.int32), (H, L, 8)), axis=1),)
    t = tl.reshape(join8(tops), (H, 64))
    c = (tl.program_id(0) * 64 + tl.arange(0, 64))[None, :]
    ok = inside & (c < columns) & (t > 0)
    tl.atomic_max(amax_ptr + (matrix * columns + c), t, mask=ok, sem="relaxed")


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
    """A warp goes through LOOPS blocks; where a program has one matrix, maxima wait for the end."""
    lead = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, 32 * W)
    column = (tl.program_id(0) * 8 + n % 8) * 8
    first = (n // 8) % 4 * 8
    begin = tl.program_id(1) * (W * LOOPS)
    matrix = lead
    mixed = False
    if GROUPED:
        group = tl.load(group_ptr + begin)
        mixed = group != tl.load(group_ptr + tl.minimum(begin + W * LOOPS, blocks) - 1)
        matrix = lead * 0 + group
    most = ()
    for _ in tl.static_range(8):
        most = most + (tl.zeros((32 * W,), tl.uint32),)
    for loop in range(LOOPS):
        block = begin + loop * W + n // 32
        has_block = block < blocks
        start, count = block_bounds(start_ptr, count_ptr, block, has_block, tokens, 32, GROUPED)
        raws, sfs, sdecs = load_sources(
            x_ptr,
            source_codes_ptr,
            source_scales_ptr,
            sdec_ptr,
            index_ptr,
            factor_ptr,
            lead * lead_stride + (start + first).to(tl.int64) * row_stride + column,
            row_stride,
            (lead * tokens + start + first).to(tl.int64),
            columns,
            column,
            has_block & (column < columns),
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
        more = ()
        for j in tl.static_range(8):
            more = more + (umax(most[j], maxima[j]),)
        most = more
        if GROUPED and mixed:
            b = (begin + loop * W + tl.arange(0, W))[:, None]
            groups = tl.load(group_ptr + b, mask=b < blocks, other=0).to(tl.int64)
            add_maxima(amax_ptr, groups, most, columns, b < blocks, W, 4)
            cleared = ()
            for j in tl.static_range(8):
                cleared = cleared + (most[j] * 0,)
            most = cleared
    add_maxima(amax_ptr, matrix + tl.zeros((1, 1), tl.int64), most, columns, True, 1, 4 * W)
