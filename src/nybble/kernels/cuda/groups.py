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


@triton.jit(do_not_specialize=["blocks", "groups"])
def block_table(
    offs_ptr,
    start_ptr,
    count_ptr,
    group_ptr,
    blocks,
    groups,
    LEAST: tl.constexpr,  # blocks of a group
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
):
    """First row, rows (-1 where no group has it) and group of each padded block along the tokens; int32."""
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
    tl.store(start_ptr + b, start, mask=b < blocks)
    tl.store(count_ptr + b, tl.where(used, tl.minimum(stop - start, BLOCK), -1), mask=b < blocks)
    tl.store(group_ptr + b, tl.sum(tl.where(mine, g[None, :], 0), axis=1), mask=b < blocks)
