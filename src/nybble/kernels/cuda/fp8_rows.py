"""Rows of experts times their experts' matrices in FP8, see `fp8_sums.py`.

Legend: R rows sorted by expert, E experts, N outputs, C contracted features.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from nybble.kernels.cuda.fp8_sums import (
    BK,
    BM,
    BN,
    CODES,
    HALF,
    HUGE,
    LINE,
    following,
    line,
    multiply,
    scaled,
)
from nybble.kernels.cuda.gluon_names import copy_rows, load_tile, store_tile


@gluon.jit
def find_tile(offs_ptr, tile, group, before, begin, end, groups):
    """(group, tiles before it, first row, end) of block number `tile` of BM rows, from an earlier block's.

    A group's blocks begin with its first row; behind the last block the group is `groups`.
    """
    while (group < groups) & (tile >= before + (end - begin + BM - 1) // BM):
        before += (end - begin + BM - 1) // BM
        begin = end
        group += 1
        end = gl.load(offs_ptr + group, mask=group < groups, other=begin)
    return group, before, begin, end


@gluon.jit
def bring_rows(
    a_desc, a_ptr, index_ptr, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, N, C, groups, tiles,
    HAS_INDEX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with both operands of each tile; rows behind an index come from all four warps."""
    across = gl.cdiv(N, 2 * BN)
    group = 0
    before = 0
    begin = 0
    end = gl.load(offs_ptr)
    slot = 0
    phase = 1
    if HAS_INDEX:
        spread: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        row = gl.arange(0, BM, layout=gl.SliceLayout(1, spread))
        column = gl.arange(0, BK, layout=gl.SliceLayout(0, spread))
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = t // across
        n = t % across * (2 * BN)
        group, before, begin, end = find_tile(offs_ptr, tile, group, before, begin, end, groups)
        if group < groups:
            first = begin + (tile - before) * BM
            if HAS_INDEX:
                source = gl.load(index_ptr + gl.minimum(first + row, end - 1)).to(gl.int64)
                pointers = a_ptr + source[:, None] * C + column[None, :]
            for k in range(0, C, BK):
                bar = ready.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                if HAS_INDEX:
                    mbarrier.expect(bar, 2 * BN * BK)
                    inside = (k + column < C)[None, :]
                    copy_rows(a_bufs.index(slot), pointers + k, mask=inside)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    mbarrier.expect(bar, (BM + 2 * BN) * BK)
                    load_tile(a_desc, [first, k], bar, a_bufs.index(slot))
                load_tile(w_desc, [group * N + n, k], bar, w_bufs.index(slot))
                slot, phase = following(slot, phase, STAGES)


@gluon.jit
def store_rows(out, out_desc, buffer, first, stop, n):
    """BF16 [64, BN] at row `first`, but no row at or beyond `stop`."""
    tma.store_wait(0)
    buffer.store(out.to(gl.bfloat16))
    fence_async_shared()
    store_tile(out_desc, [HUGE, stop, HUGE - (stop - first), n], buffer)


@gluon.jit
def use_rows(
    a_scales_ptr, index_ptr, w_scales_ptr, offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, N, C,
    groups, tiles, UPPER: gl.constexpr, HAS_INDEX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the rows of each tile, by four warps."""
    across = gl.cdiv(N, 2 * BN)
    group = 0
    before = 0
    begin = 0
    end = gl.load(offs_ptr)
    slot = 0
    phase = 0
    buffer = out_bufs.index(UPPER)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = t // across
        n = t % across * (2 * BN)
        group, before, begin, end = find_tile(offs_ptr, tile, group, before, begin, end, groups)
        if group < groups:
            first = begin + (tile - before) * BM + HALF * UPPER
            source = gl.minimum(first + gl.arange(0, HALF, layout=LINE), end - 1)
            if HAS_INDEX:
                source = gl.load(index_ptr + source)
            a_scale = gl.load(a_scales_ptr + source)
            left_scale = line(w_scales_ptr + group * N, n, N)
            right_scale = line(w_scales_ptr + group * N, n + BN, N)
            left, right, slot, phase = multiply(
                a_bufs, w_bufs, ready, empty, slot, phase, gl.cdiv(C, BK), UPPER, HAS_INDEX, STAGES
            )
            if first < end:
                store_rows(scaled(left, a_scale, left_scale), out_desc, buffer, first, end, n)
                if n + BN < N:
                    store_rows(scaled(right, a_scale, right_scale), out_desc, buffer, first, end, n + BN)
    tma.store_wait(0)


@gluon.jit
def product_of_rows(
    a_desc,  # E4M3 [R, C]; without HAS_INDEX
    a_ptr,  # the same; with HAS_INDEX rows of any number
    a_scales_ptr,  # FP32, one a row of it
    index_ptr,  # int32 [R]: row of a of each row, with HAS_INDEX
    w_desc,  # E4M3 [E * N, C]
    w_scales_ptr,  # FP32 [E * N]
    offs_ptr,  # int32 [E]
    out_desc,  # BF16 [R, N], whose tiles end at a row that is said
    N,
    C,
    groups,
    tiles,  # as many as any ends of groups give
    HAS_INDEX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles of one block of rows follow one another, so that they find it in the L2 cache."""
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, BK], CODES)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * BN, BK], CODES)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + 128 * HAS_INDEX)  # the TMA, and each thread that copies
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (use_rows, (
                a_scales_ptr, index_ptr, w_scales_ptr, offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready,
                empty, N, C, groups, tiles, 0, HAS_INDEX, STAGES,
            )),
            (use_rows, (
                a_scales_ptr, index_ptr, w_scales_ptr, offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready,
                empty, N, C, groups, tiles, 1, HAS_INDEX, STAGES,
            )),
            (bring_rows, (
                a_desc, a_ptr, index_ptr, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, N, C, groups, tiles,
                HAS_INDEX, STAGES,
            )),
        ],
        [4, 4 if HAS_INDEX else 1],
        [224 if HAS_INDEX else 240, 56 if HAS_INDEX else 24],
    )  # fmt: skip
