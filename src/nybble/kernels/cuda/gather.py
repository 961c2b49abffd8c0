"""Rows of a matrix in another order, each times a factor."""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import floats, load_raw, times
from nybble.kernels.cuda.stores import store_values


@triton.jit
def lanes(rows, units, first, BR: tl.constexpr, N: tl.constexpr):
    """(row, unit, mask) of BR * N lanes over BR rows, whose units begin at `first`.

    A row of few units alone would leave a program too little to wait for at once.
    """
    lane = tl.arange(0, BR * N)
    row = tl.program_id(0) * BR + lane // N
    unit = first + lane % N
    return row.to(tl.int64), unit.to(tl.int64), (unit < units) & (row < rows)


@triton.jit(do_not_specialize=["rows", "units"])
def gather_rows(
    x_ptr,  # BF16 pairs [T, C]
    index_ptr,  # int32 [R]
    factor_ptr,  # FP32 [R]
    out_ptr,  # BF16 pairs [R, C]
    rows,
    units,  # C / 8
    HAS_FACTOR: tl.constexpr,
    BR: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[r] = x[index[r]] * factor[r]."""
    row, u, mask = lanes(rows, units, tl.program_id(1) * N, BR, N)
    source = tl.load(index_ptr + row, mask=mask, other=0).to(tl.int64)
    raw = load_raw(x_ptr, (source * units + u) * 8, mask, True)
    if HAS_FACTOR:
        raw = times(raw, tl.load(factor_ptr + row, mask=mask, other=0.0), True, ASM)
    store_values(out_ptr, (row * units + u) * 8, floats(raw, True), mask, True, ASM)
