"""Rows of experts times their experts' matrices in BF16 on Hopper, a part of a matrix kept in shared memory.

What binds such a product where few features are contracted is the L2 cache: tiles of 128 x 256 read 800 MB of
it for 65536 rows of 512 features and 896 outputs. Here a program has BN outputs of one expert in shared
memory, all that is contracted, for as long as its rows belong to that expert, and only rows stream.

Two groups of four warps multiply 64 rows each, at their own pace: one stores while the other one's products
run. Two more warps bring rows to a ring of STAGES buffers for each, and the first of them the matrices.

Legend: R rows sorted by expert, E experts, N outputs, C contracted features.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from nybble.kernels.cuda.fp8_rows import store_rows
from nybble.kernels.cuda.fp8_sums import BN, HALF, HUGE, following
from nybble.kernels.cuda.gluon_names import load_tile

CK = gl.constexpr(64)  # features of a chunk: 128 bytes
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
VALUES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def rows_of_program(offs_ptr, N, groups, G: gl.constexpr, WARPS: gl.constexpr):
    """(ends of the groups, first output, first row, end): programs of one span of rows share no output."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    g = gl.arange(0, G, layout=line)
    ends = gl.load(offs_ptr + g, mask=g < groups, other=HUGE)
    across = gl.cdiv(N, BN)
    spans = gl.num_programs(0) // across
    span = gl.program_id(0) // across
    rows = gl.load(offs_ptr + groups - 1)
    each = gl.cdiv(rows, spans)
    row = gl.minimum(span * each, rows)
    return ends, gl.program_id(0) % across * BN, row, gl.minimum(row + each, rows)


@gluon.jit
def group_at(ends, row, stop):
    """(the group of a row, where its rows end, `stop` at most)."""
    group = gl.sum((ends <= row).to(gl.int32), axis=0)
    return group, gl.minimum(gl.min(gl.where(ends > row, ends, HUGE), axis=0), stop)


@gluon.jit
def bring(
    a_desc, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, C, groups,
    UPPER: gl.constexpr, TRANSPOSE: gl.constexpr, STEPS: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill one ring with rows; the lower half brings the chunks of each expert's matrix as they get free."""
    ends, n, row, stop = rows_of_program(offs_ptr, N, groups, G, 1)
    slot = 0
    phase = 1
    w_phase = 1
    while row < stop:
        group, end = group_at(ends, row, stop)
        if not UPPER:
            for k in range(STEPS):
                bar = w_ready.index(k)
                mbarrier.wait(w_empty.index(k), w_phase)
                mbarrier.expect(bar, 2 * BN * CK)
                if TRANSPOSE:
                    load_tile(w_desc, [group * N + n, k * CK], bar, w_bufs.index(k))
                else:
                    load_tile(w_desc, [group * C + k * CK, n], bar, w_bufs.index(k))
            w_phase ^= 1
        for first in range(row + HALF * UPPER, end, 2 * HALF):
            for k in range(STEPS):
                bar = ready.index(STAGES * UPPER + slot)
                mbarrier.wait(empty.index(STAGES * UPPER + slot), phase)
                mbarrier.expect(bar, 2 * HALF * CK)
                load_tile(a_desc, [first, k * CK], bar, a_bufs.index(STAGES * UPPER + slot))
                slot, phase = following(slot, phase, STAGES)
        row = end


@gluon.jit
def use(
    offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, groups,
    UPPER: gl.constexpr, TRANSPOSE: gl.constexpr, STEPS: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the rows of each block of 128, by four warps; the last block frees the matrix."""
    ends, n, row, stop = rows_of_program(offs_ptr, N, groups, G, 4)
    slot = 0
    phase = 0
    w_phase = 0
    while row < stop:
        _, end = group_at(ends, row, stop)
        for block in range(row, end, 2 * HALF):
            first = block + HALF * UPPER
            last = block + 2 * HALF >= end
            if first < end:
                sums = gl.zeros((HALF, BN), gl.float32, layout=SUMS)
                before = STAGES * UPPER + slot
                for k in range(STEPS):
                    at = STAGES * UPPER + slot
                    mbarrier.wait(w_ready.index(k), w_phase)
                    mbarrier.wait(ready.index(at), phase)
                    w = w_bufs.index(k)
                    if TRANSPOSE:
                        w = w.permute((1, 0))
                    sums = warpgroup_mma(a_bufs.index(at), w, sums, is_async=True)
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                    mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
                    mbarrier.arrive(w_empty.index(gl.maximum(k - 1, 0)), count=1, pred=last & (k > 0))
                    before = at
                    slot, phase = following(slot, phase, STAGES)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(empty.index(before), count=1)
                mbarrier.arrive(w_empty.index(STEPS - 1), count=1, pred=last)
                store_rows(sums, out_desc, out_bufs.index(UPPER), first, end, n)
            else:
                for k in range(STEPS):  # so that no one's arrival counts for the next matrix
                    mbarrier.wait(w_ready.index(k), w_phase)
                    mbarrier.arrive(w_empty.index(k), count=1)
        w_phase ^= 1
        row = end
    tma.store_wait(0)


@gluon.jit
def product_of_rows(
    a_desc,  # BF16 [R, C]
    w_desc,  # BF16 [E * N, C] with TRANSPOSE, else [E * C, N]
    offs_ptr,  # int32 [E]
    out_desc,  # BF16 [R, N], whose tiles end at a row that is said
    N,
    C,
    groups,
    TRANSPOSE: gl.constexpr,
    STEPS: gl.constexpr,  # C / CK
    G: gl.constexpr,  # groups up to a power of two
    STAGES: gl.constexpr,
):
    """As many programs an output as fit on the GPU at once, each for a span of the rows."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, HALF, CK], VALUES)
    tile: gl.constexpr = [STEPS, BN, CK] if TRANSPOSE else [STEPS, CK, BN]
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, tile, VALUES)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], VALUES)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STEPS):
        mbarrier.init(w_ready.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (use, (
                offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, groups,
                0, TRANSPOSE, STEPS, G, STAGES,
            )),
            (use, (
                offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, groups,
                1, TRANSPOSE, STEPS, G, STAGES,
            )),
            (bring, (
                a_desc, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, C, groups,
                0, TRANSPOSE, STEPS, G, STAGES,
            )),
            (bring, (
                a_desc, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, C, groups,
                1, TRANSPOSE, STEPS, G, STAGES,
            )),
        ],
        [4, 1, 1],
        [200, 40, 40],
    )  # fmt: skip
