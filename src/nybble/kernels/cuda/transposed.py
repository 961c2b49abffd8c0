"""What wgrad takes of dgrad's codes of dy: the codes as columns, the scales of their rows as factors of x.

Legend: T rows of C codes, R rows that wgrad sums over, k of them for each row of codes.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda.finish_columns import store_transposed
from nybble.kernels.cuda.registers import even_odd_bytes, join8
from nybble.kernels.cuda.sources import block_bounds

BLOCK = tl.constexpr(32)  # tokens of a warp
LANES = tl.constexpr(4)  # of eight tokens


@triton.jit
def turned(a, b, c, d, ASM: tl.constexpr):
    """Four words whose byte i is byte 0, 1, 2 or 3 of the i-th word."""
    e0, o0 = even_odd_bytes(a, b, ASM)
    e1, o1 = even_odd_bytes(c, d, ASM)
    w0, w2 = even_odd_bytes(e0, e1, ASM)
    w1, w3 = even_odd_bytes(o0, o1, ASM)
    return w0, w1, w2, w3


@triton.jit
def turned_rows(rows, ASM: tl.constexpr):
    """Sixteen words of eight columns, rows 0 to 3 of each, then 4 to 7, of eight rows as int64."""
    out = ()
    for h in tl.static_range(2):
        low = ()
        high = ()
        for i in tl.static_range(4 * h, 4 * h + 4):
            low = low + (rows[i].to(tl.uint32),)
            high = high + ((rows[i] >> 32).to(tl.uint32),)
        out = (
            out
            + turned(low[0], low[1], low[2], low[3], ASM)
            + turned(high[0], high[1], high[2], high[3], ASM)
        )
    return out


@triton.jit(do_not_specialize=["blocks"])
def transpose_codes(
    codes_ptr,  # int64, eight codes [T, C] each
    out_ptr,  # int32, four codes [C, P] each
    start_ptr,  # of each block of P: its first row,
    count_ptr,  # and its rows, -1 for padding
    index_ptr,  # int32 [R]: the row of codes that each row is, if HAS_INDEX
    columns,  # C, a multiple of 8
    blocks,
    HAS_INDEX: tl.constexpr,
    W: tl.constexpr,  # warps, a block each
    ASM: tl.constexpr,
):
    """A thread takes eight rows of eight codes, a warp 32 rows of 64."""
    K: tl.constexpr = 32 // LANES
    n = tl.arange(0, 32 * W)
    unit = tl.program_id(0) * K + n % K
    block = tl.program_id(1) * W + n // 32
    first = (n // K) % LANES * 8
    has_block = block < blocks
    start, count = block_bounds(start_ptr, count_ptr, block, has_block, 0, BLOCK, True)
    inside = has_block & (unit * 8 < columns)
    rows = ()
    for i in tl.static_range(8):
        mask = inside & (first + i < count)
        row = (start + first + i).to(tl.int64)
        if HAS_INDEX:
            row = tl.load(index_ptr + row, mask=mask, other=0).to(tl.int64)
        rows = rows + (tl.load(codes_ptr + (row * (columns >> 3) + unit), mask=mask, other=0),)
    halves = turned_rows(rows, ASM)
    pairs = ()
    for j in tl.static_range(8):
        pairs = pairs + (tl.join(halves[j], halves[8 + j]),)
    t = tl.reshape(join8(pairs), (W, LANES, K, 2, 8))
    t = tl.reshape(tl.permute(t, (2, 4, 0, 1, 3)), (K * 8, W * LANES * 2))
    store_transposed(
        out_ptr,
        t,
        tl.program_id(2).to(tl.int64),
        tl.program_id(1),
        columns,
        blocks * (BLOCK // 4),
        K * 8,
        W * LANES * 2,
    )


@triton.jit
def transpose_tile(codes_ptr, out_ptr, tile, start, count, units, tiles, N: tl.constexpr, ASM: tl.constexpr):
    """The same of one tile and all columns, by N threads; both pointers are to int64.

    Four threads write what belongs to a column, 32 bytes, without shared memory.
    """
    n = tl.arange(0, N)
    first = n % LANES * 8
    begin = 0
    while begin < units:
        unit = begin + n // LANES
        rows = ()
        for i in tl.static_range(8):
            row = (start + first + i).to(tl.int64)
            mask = (unit < units) & (first + i < count)
            rows = rows + (tl.load(codes_ptr + (row * units + unit), mask=mask, other=0),)
        halves = turned_rows(rows, ASM)
        for j in tl.static_range(8):
            both = halves[j].to(tl.uint64) | (halves[8 + j].to(tl.uint64) << 32)
            at = (unit * 8 + j).to(tl.int64) * (tiles * LANES) + (tile * LANES + n % LANES)
            tl.store(out_ptr + at, both.to(tl.int64, bitcast=True), mask=unit < units)
        begin += N // LANES


@triton.jit(do_not_specialize=["rows", "words", "k"])
def gradient_factors(
    codes_ptr,  # int32, four codes [T, C] each
    scales_ptr,  # FP32 [T]
    order_ptr,  # int32 [R]: pair of each row, if HAS_ORDER
    weights_ptr,  # FP32 [R] by pair, if HAS_WEIGHTS
    out_ptr,  # FP32 [R]
    rows,
    words,
    k,
    HAS_ORDER: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,  # words of a row at a time
):
    """Weight * scale of each row, 0 for rows of zeros. Codes are read where a scale is 1, as theirs are."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    mask = row < rows
    pair = tl.load(order_ptr + row, mask=mask, other=0) if HAS_ORDER else row
    at = pair // k
    s = tl.load(scales_ptr + at, mask=mask, other=0.0)
    doubtful = s == 1.0
    if tl.max(doubtful.to(tl.int32), axis=0) > 0:
        found = tl.zeros((N, CHUNK), tl.int32)
        c = tl.arange(0, CHUNK)
        begin = 0
        while begin < words:
            look = doubtful[:, None] & (begin + c < words)[None, :]
            found |= tl.load(
                codes_ptr + at.to(tl.int64)[:, None] * words + (begin + c)[None, :], mask=look, other=0
            )
            begin += CHUNK
        some = tl.max((found & 0x7F7F7F7F != 0).to(tl.int32), axis=1) > 0
        s = tl.where(doubtful & (some == 0), 0.0, s)
    if HAS_WEIGHTS:
        s = tl.load(weights_ptr + pair, mask=mask, other=0.0) * s
    tl.store(out_ptr + row, s, mask=mask)
