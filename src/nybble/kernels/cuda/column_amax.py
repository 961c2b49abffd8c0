"""The largest magnitude of whole columns, of matrices or of token groups.

Tiles as in `columns.py`: a warp takes 32 tokens x 64 features at a time. A bound of it needs no codes.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits
from nybble.kernels.cuda.nvfp4 import load_e4m3
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


@triton.jit(do_not_specialize=["blocks"])
def column_bounds(
    scales_ptr,  # uint8 [T, C / 16], E4M3: block scales of NVFP4 codes
    sdec_ptr,  # FP32 [T]
    amax_ptr,  # int32 [G, C], zeros on entry: FP32 bits, NaN above Inf
    start_ptr,  # of each tile of 32 rows: its first row,
    count_ptr,  # its rows, -1 for padding,
    group_ptr,  # and its group
    index_ptr,  # int32 [R]: row of the codes that each row is, if HAS_INDEX
    factor_ptr,  # FP32 [R]: of their outer scales, if HAS_FACTOR
    columns,
    blocks,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    CB: tl.constexpr,  # block scales of a row that a program reads
    W: tl.constexpr,  # tiles of a program
    ASM: tl.constexpr,
):
    """What 6, the largest code, stands for in the largest blocks: an upper bound of the amax of columns."""
    begin = tl.program_id(1) * W
    n = tl.arange(0, W * 32)
    tile = begin + n // 32
    has_tile = tile < blocks
    start, count = block_bounds(start_ptr, count_ptr, tile, has_tile, 0, 32, True)
    row = start + n % 32
    inside = n % 32 < count
    at = row
    if HAS_INDEX:
        at = tl.load(index_ptr + row, mask=inside, other=0)
    s = tl.load(sdec_ptr + at, mask=inside, other=0.0)
    if HAS_FACTOR:
        s = tl.abs(s * tl.load(factor_ptr + row, mask=inside, other=0.0))
    per_row = (columns + 15) >> 4
    c = tl.program_id(0) * CB + tl.arange(0, CB)
    scale = load_e4m3(
        scales_ptr,
        at.to(tl.int64)[:, None] * per_row + c[None, :],
        inside[:, None] & (c < per_row)[None, :],
        ASM,
    )
    top = (bits((scale * 6.0) * s[:, None]) & 0x7FFFFFFF).to(tl.int32)
    top = tl.max(tl.reshape(top, (W, 32, CB)), axis=1)
    first = tl.load(group_ptr + begin)
    if first == tl.load(group_ptr + tl.minimum(begin + W, blocks) - 1):
        add_bounds(amax_ptr, first + tl.zeros((1,), tl.int32), tl.max(top, axis=0)[None, :], c, columns, CB)
    else:
        w = begin + tl.arange(0, W)
        add_bounds(amax_ptr, tl.load(group_ptr + w, mask=w < blocks, other=0), top, c, columns, CB)


@triton.jit
def add_bounds(amax_ptr, group, top, c, columns, CB: tl.constexpr):
    """The bounds `top` [W, CB] of blocks c of 16 columns into the amaxes of groups [W]."""
    column = (c[:, None] * 16 + tl.arange(0, 16)[None, :])[None]
    t = top[:, :, None] + tl.zeros((top.shape[0], CB, 16), tl.int32)
    at = group.to(tl.int64)[:, None, None] * columns + column
    tl.atomic_max(amax_ptr + at, t, mask=(column < columns) & (t > 0), sem="relaxed")
