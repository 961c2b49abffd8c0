"""Outer amaxes in one read: the largest finite magnitude of a tensor, a matrix or a token group."""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import advance
from nybble.kernels.cuda.scales import INFINITE
from nybble.kernels.cuda.units import finite_unit_magnitude, load_unit, top, unit_magnitude


@triton.jit(do_not_specialize=["units", "groups"])
def amax_rows(
    x_ptr,
    amax_ptr,  # int32 view of the FP32 result, zeros on entry
    offs_ptr,
    group_ptr,
    row_stride,
    units,
    groups,
    IN_BF16: tl.constexpr,
    HAS_OFFS: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    ROW_AXIS: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Each row of x [R, units * 8 * CHUNKS] into the amax of its group (its own without HAS_GROUP)."""
    # From the end, so that the quantiser, which begins at the start, finds that in the cache.
    row = (tl.num_programs(ROW_AXIS) - 1 - tl.program_id(ROW_AXIS)).to(tl.int64)
    tile = (tl.num_programs(1 - ROW_AXIS) - 1 - tl.program_id(1 - ROW_AXIS)).to(tl.int64) * N
    inside = True
    if HAS_OFFS:
        inside = row < tl.load(offs_ptr + groups - 1)
    u = tl.arange(0, N)
    x_ptr = advance(x_ptr, row * row_stride + tile * (8 * CHUNKS), IN_BF16)
    raws = load_unit(x_ptr, 0, u, (u < tl.minimum(units - tile, N)) & inside, CHUNKS, IN_BF16)
    t = top(unit_magnitude(raws, CHUNKS, IN_BF16, ASM))
    if t >= INFINITE:  # a second look, at finite elements
        t = top(finite_unit_magnitude(raws, CHUNKS, IN_BF16))
    which = row
    if HAS_GROUP:
        which = tl.load(group_ptr + row).to(tl.int64)
    # FP32 magnitudes are ordered as their bits are.
    tl.atomic_max(amax_ptr + which, t.to(tl.int32), sem="relaxed")
