"""Where token groups lie, worked out on the device: nothing waits for `offs` to reach the host."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "groups"])
def row_groups(offs_ptr, group_ptr, rows, groups, N: tl.constexpr, G: tl.constexpr):
    """int32 [rows]: the group of each row, the last one for rows of none."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    g = tl.arange(0, G)
    ends = tl.load(offs_ptr + g, mask=g < groups, other=2147483647)
    below = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    tl.store(group_ptr + row, tl.minimum(below, groups - 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def row_facts(
    order_ptr,  # int32 [R]: pair of each row
    rows_ptr,  # int64 [T]: what each token counts as in draws, if HAS_ROWS
    token_ptr,  # int32 [R]
    place_ptr,  # int32 [R], by pair
    pairs_ptr,  # int64 [R], if PAIRS
    rows,
    k: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """Token of each row, row of each pair, and what each row counts as in random draws."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    mask = row < rows
    pair = tl.load(order_ptr + row, mask=mask, other=0)
    token = pair // k
    tl.store(token_ptr + row, token, mask=mask)
    tl.store(place_ptr + pair, row, mask=mask)
    if PAIRS:
        counted = pair.to(tl.int64)
        if HAS_ROWS:
            counted = tl.load(rows_ptr + token, mask=mask, other=0) * k + pair % k
        tl.store(pairs_ptr + row, counted, mask=mask)


@triton.jit(do_not_specialize=["blocks", "groups"])
def block_table(
    offs_ptr,
    table_ptr,  # int32 [3, blocks]
    ends_ptr,  # int32 [G]: where the padded blocks of each group end, if ENDS
    blocks,
    groups,
    LEAST: tl.constexpr,  # blocks of a group
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
):
    """First row, rows and group of each padded block along the tokens.

    A block that no group has has -1 rows and counts as the last group's.
    """
    b = tl.program_id(0) * N + tl.arange(0, N)
    g = tl.arange(0, G)
    end = tl.load(offs_ptr + g, mask=g < groups, other=0)
    begin = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
    count = tl.where(g < groups, tl.maximum((end - begin + BLOCK - 1) // BLOCK, LEAST), 0)
    last = tl.cumsum(count, axis=0)  # one past each group's last block
    # Exactly one group has first <= b < last, or none.
    mine = (last[None, :] > b[:, None]) & ((last - count)[None, :] <= b[:, None])
    start = tl.sum(tl.where(mine, begin[None, :] + (b[:, None] - (last - count)[None, :]) * BLOCK, 0), axis=1)
    stop = tl.sum(tl.where(mine, end[None, :], 0), axis=1)
    used = tl.sum(mine.to(tl.int32), axis=1) > 0
    group = tl.where(used, tl.sum(tl.where(mine, g[None, :], 0), axis=1), groups - 1)
    tl.store(table_ptr + b, start, mask=b < blocks)
    tl.store(table_ptr + blocks + b, tl.where(used, tl.minimum(stop - start, BLOCK), -1), mask=b < blocks)
    tl.store(table_ptr + 2 * blocks + b, group, mask=b < blocks)
    if ENDS:
        tl.store(ends_ptr + g, last * BLOCK, mask=(g < groups) & (tl.program_id(0) == 0))
