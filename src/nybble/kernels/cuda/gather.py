"""Rows of a matrix in another order, each times a factor."""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import floats, load_raw, store_values, times


@triton.jit(do_not_specialize=["units"])
def gather_rows(
    x_ptr,  # BF16 pairs [T, C]
    index_ptr,  # int32 [R]
    factor_ptr,  # FP32 [R]
    out_ptr,  # BF16 pairs [R, C]
    units,  # C / 8
    HAS_FACTOR: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[r] = x[index[r]] * factor[r]."""
    row = tl.program_id(0).to(tl.int64)
    u = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    mask = u < units
    raw = load_raw(x_ptr, (tl.load(index_ptr + row).to(tl.int64) * units + u) * 8, mask, True)
    if HAS_FACTOR:
        raw = times(raw, tl.load(factor_ptr + row), True, ASM)
    store_values(out_ptr, (row * units + u) * 8, floats(raw, True), mask, True, ASM)
