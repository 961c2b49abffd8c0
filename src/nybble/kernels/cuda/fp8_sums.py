"""Products of experts on Hopper's FP8 tensor cores: E4M3 codes with one FP32 scale a row of either operand.

A program stays on its multiprocessor and goes through tiles of BM rows by 2 BN columns. One warp brings the
operands of what follows to a ring of STAGES buffers in shared memory, through the tensor memory accelerator
(TMA); two groups of four warps multiply, 64 rows each, while the other one adds and stores. Warps of unlike
work need Gluon, Triton's lower language.

The tensor cores add with fewer bits than FP32, so each sum leaves them after BK = 128 products and is added
to FP32 registers. Scales are multiplied in at the end, once.

This file has what products of rows (`fp8_rows.py`) and of groups along the contraction (`fp8_groups.py`)
share; descriptors and grids are in `launch_fp8.py`.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = gl.constexpr(128)
BN = gl.constexpr(128)
BK = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a group of warps
HUGE = gl.constexpr(1 << 30)
WRAP = gl.constexpr(1 << 26)
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    """The next buffer of the ring, and the phase of its barriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def partial(a, b):
    """FP32 [64, BN]: what the tensor cores add up of BK products."""
    zero = gl.zeros((HALF, BN), gl.float32, layout=SUMS)
    part = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def multiply(
    a_bufs, b_bufs, ready, empty, slot, phase, steps,
    UPPER: gl.constexpr, FENCE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(sums of 64 rows with the first BN columns, with the second, slot, phase) over the next `steps`."""
    left = gl.zeros((HALF, BN), gl.float32, layout=SUMS)
    right = gl.zeros((HALF, BN), gl.float32, layout=SUMS)
    for _ in range(steps):
        mbarrier.wait(ready.index(slot), phase)
        if FENCE:  # what other warps stored in shared memory, tensor cores read
            fence_async_shared()
        a = a_bufs.index(slot).slice(HALF * UPPER, HALF, dim=0)
        b = b_bufs.index(slot)
        left = left + partial(a, b.slice(0, BN, dim=0))
        part = partial(a, b.slice(BN, BN, dim=0))
        mbarrier.arrive(empty.index(slot), count=1)
        right = right + part
        slot, phase = following(slot, phase, STAGES)
    return left, right, slot, phase


@gluon.jit
def line(ptr, first, count):
    """BN values from `first` on, zeros beyond `count`: asked for early, spread over sums when needed."""
    at = first + gl.arange(0, BN, layout=LINE)
    return gl.load(ptr + at, mask=at < count, other=0.0)


@gluon.jit
def scaled(sums, row_scale, column_scale):
    """Sums times the scales of their columns, then of their rows."""
    columns = gl.convert_layout(column_scale, gl.SliceLayout(0, SUMS))
    rows = gl.convert_layout(row_scale, gl.SliceLayout(1, SUMS))
    return sums * columns[None, :] * rows[:, None]
