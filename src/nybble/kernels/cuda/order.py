"""A stable counting sort of pairs by their expert: counts of each block of pairs, then each pair's row.

Between the two kernels the counts, expert after expert and block after block, are summed up: the sum before
an expert's block is the row of its first pair.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def load_experts(experts_ptr, pair, pairs, count):
    """int32: `count` for an expert that is not here, `count` + 1 behind the last pair."""
    e = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    e = tl.minimum(tl.maximum(e, 0), count).to(tl.int32)
    return tl.where(pair < pairs, e, count + 1)


@triton.jit(do_not_specialize=["pairs", "count", "blocks"])
def count_blocks(experts_ptr, counts_ptr, pairs, count, blocks, N: tl.constexpr, C: tl.constexpr):
    """counts int32 [count + 1, blocks]: pairs of each expert in each block of N; C > count + 1."""
    block = tl.program_id(0)
    e = load_experts(experts_ptr, block * N + tl.arange(0, N), pairs, count)
    c = tl.arange(0, C)
    tl.store(counts_ptr + (c * blocks + block), tl.histogram(e, C), mask=c <= count)


@triton.jit(do_not_specialize=["pairs", "count", "blocks"])
def place_pairs(
    experts_ptr,
    sums_ptr,  # int32 [count + 1, blocks]: counts summed up, their own included
    order_ptr,  # int32 [R]
    ends_ptr,  # int32 [count]
    pairs,
    count,
    blocks,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The pair at each row, and where experts end."""
    block = tl.program_id(0)
    i = tl.arange(0, N)
    pair = block * N + i
    e = load_experts(experts_ptr, pair, pairs, count)
    earlier = (e[None, :] == e[:, None]) & (i[None, :] < i[:, None])
    at = e * blocks + block
    before = tl.load(sums_ptr + at - 1, mask=(pair < pairs) & (at > 0), other=0)
    row = before + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + row, pair, mask=pair < pairs)
    if block == 0:
        c = tl.arange(0, C)
        last = tl.load(sums_ptr + (c + 1) * blocks - 1, mask=c < count, other=0)
        tl.store(ends_ptr + c, last, mask=c < count)


@triton.jit(do_not_specialize=["pairs", "count"])
def add_counts(experts_ptr, counts_ptr, pairs, count, N: tl.constexpr, C: tl.constexpr):
    """counts int64 [count], zeros on entry: pairs of each expert."""
    e = load_experts(experts_ptr, tl.program_id(0) * N + tl.arange(0, N), pairs, count)
    c = tl.arange(0, C)
    found = tl.histogram(e, C).to(tl.int64)
    tl.atomic_add(counts_ptr + c, found, mask=(c < count) & (found > 0), sem="relaxed")
