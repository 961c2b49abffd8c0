"""Products of groups along the contraction in FP8, see `fp8_sums.py`.

Legend: a [N, P] times b [K, P], G groups along P.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nybble.kernels.cuda.fp8_sums import (
    BK,
    BM,
    BN,
    CODES,
    HALF,
    HUGE,
    LINE,
    SUMS,
    WRAP,
    following,
    line,
    multiply,
    scaled,
)
from nybble.kernels.cuda.gluon_names import barrier, load_tile


@gluon.jit
def turn(r, SORTED: gl.constexpr):
    """A program's tile in round r.

    With SORTED every other round goes back: who had the longest group gets the shortest one next.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if SORTED and r % 2 == 1:
        place = programs - 1 - place
    return r * programs + place


@gluon.jit
def group_tile(order_ptr, ends_ptr, t, N, K, SORTED: gl.constexpr):
    """(group, its begin and end, first row, first column) of tile number t."""
    across = gl.cdiv(K, 2 * BN)
    each = gl.cdiv(N, BM) * across
    group = t // each
    if SORTED:
        group = gl.load(order_ptr + group)
    begin = gl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = gl.load(ends_ptr + group)
    return group, begin, end, t % each // across * BM, t % across * (2 * BN)


@gluon.jit
def bring_columns(
    a_desc, b_desc, order_ptr, ends_ptr, a_bufs, b_bufs, ready, empty, N, K, tiles,
    SORTED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with both operands of each tile, with zeros beyond the end of its group."""
    slot = 0
    phase = 1
    for r in range(gl.cdiv(tiles, gl.num_programs(0))):
        t = turn(r, SORTED)
        if t < tiles:
            _, begin, end, m, n = group_tile(order_ptr, ends_ptr, t, N, K, SORTED)
            for p in range(begin, end, BK):
                bar = ready.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(bar, (BM + 2 * BN) * BK)
                at = HUGE - (end - p)
                load_tile(a_desc, [WRAP, end // 32, m, at], bar, a_bufs.index(slot))
                load_tile(b_desc, [WRAP, end // 32, n, at], bar, b_bufs.index(slot))
                slot, phase = following(slot, phase, STAGES)


@gluon.jit
def store_group(out, out_ptr, row, N, n, K):
    """[64, BN] of one group's matrix [N, K]."""
    column = n + gl.arange(0, BN, layout=gl.SliceLayout(0, SUMS))
    at = out_ptr + row[:, None] * K + column[None, :]
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=(row < N)[:, None] & (column < K)[None, :])


@gluon.jit
def use_columns(
    a_scales_ptr, b_scales_ptr, out_ptr, order_ptr, ends_ptr, a_bufs, b_bufs, ready, empty, N, K, tiles,
    UPPER: gl.constexpr, A_SCALED: gl.constexpr, SORTED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the rows of each tile, by four warps."""
    slot = 0
    phase = 0
    for r in range(gl.cdiv(tiles, gl.num_programs(0))):
        t = turn(r, SORTED)
        if t < tiles:
            group, begin, end, m, n = group_tile(order_ptr, ends_ptr, t, N, K, SORTED)
            m += HALF * UPPER
            mine = m + gl.arange(0, HALF, layout=LINE)
            a_scale = gl.full((HALF,), 1.0, gl.float32, layout=LINE)
            if A_SCALED:
                a_scale = gl.load(a_scales_ptr + group * N + mine, mask=mine < N, other=0.0)
            left_scale = line(b_scales_ptr + group * K, n, K)
            right_scale = line(b_scales_ptr + group * K, n + BN, K)
            left, right, slot, phase = multiply(
                a_bufs, b_bufs, ready, empty, slot, phase, gl.cdiv(end - begin, BK), UPPER, False, STAGES
            )
            row = m + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))
            out = out_ptr + group.to(gl.int64) * N * K
            store_group(scaled(left, a_scale, left_scale), out, row, N, n, K)
            store_group(scaled(right, a_scale, right_scale), out, row, N, n + BN, K)


@gluon.jit
def sort_groups(ends_ptr, order_ptr, groups, G: gl.constexpr):
    """Write the groups by falling length, as every program does; each reads what it wrote itself."""
    square: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    g = gl.arange(0, G, layout=gl.SliceLayout(1, square))
    h = gl.arange(0, G, layout=gl.SliceLayout(0, square))
    g_size = group_size(ends_ptr, g, groups)
    h_size = group_size(ends_ptr, h, groups)[None, :]
    before = (h_size > g_size[:, None]) | ((h_size == g_size[:, None]) & (h[None, :] < g[:, None]))
    gl.store(order_ptr + gl.sum(before.to(gl.int32), axis=1), g, mask=g < groups)
    barrier()


@gluon.jit
def group_size(ends_ptr, g, groups):
    """Lengths of groups, -1 for numbers that none has."""
    end = gl.load(ends_ptr + g, mask=g < groups, other=-1)
    return end - gl.load(ends_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)


@gluon.jit
def product_of_groups(
    a_desc,  # E4M3 [N, P], whose tiles end at a column that is said
    a_scales_ptr,  # FP32 [G, N], if A_SCALED
    b_desc,  # E4M3 [K, P], likewise
    b_scales_ptr,  # FP32 [G, K]
    ends_ptr,  # int32 [G], multiples of 32
    order_ptr,  # int32 [G], room
    out_ptr,  # [G, N, K]
    N,
    K,
    groups,
    tiles,
    G: gl.constexpr,  # groups up to a power of two
    A_SCALED: gl.constexpr,
    SORTED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles of one group follow one another, those of long groups first."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], CODES)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * BN, BK], CODES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if SORTED:
        sort_groups(ends_ptr, order_ptr, groups, G)
    gl.warp_specialize(
        [
            (use_columns, (
                a_scales_ptr, b_scales_ptr, out_ptr, order_ptr, ends_ptr, a_bufs, b_bufs, ready, empty, N, K,
                tiles, 0, A_SCALED, SORTED, STAGES,
            )),
            (use_columns, (
                a_scales_ptr, b_scales_ptr, out_ptr, order_ptr, ends_ptr, a_bufs, b_bufs, ready, empty, N, K,
                tiles, 1, A_SCALED, SORTED, STAGES,
            )),
            (bring_columns, (
                a_desc, b_desc, order_ptr, ends_ptr, a_bufs, b_bufs, ready, empty, N, K, tiles, SORTED,
                STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
