"""What the descriptors of FP8 products address, without a GPU: groups end where they should."""

import pytest
import torch

from nybble.kernels import hopper
from nybble.kernels.hopper import FP8

pytestmark = pytest.mark.skipif(hopper.own_reason() is not None, reason=str(hopper.own_reason()))
STEPS = (0, 1, 31, 32, 63, 64, 95, 127)


def offset(descriptor, at):
    """Element at coordinates `at`, by its address from the base; None where a bound cuts it off."""
    if not all(0 <= i < bound for i, bound in zip(at, descriptor.shape, strict=True)):
        return None
    size = descriptor.base.element_size()
    moved = sum(i * stride for i, stride in zip(at, descriptor.strides, strict=True)) * size
    return moved % 2**64 / size


@pytest.mark.parametrize(
    ("row", "column", "end"), [(0, 0, 32), (96, 288, 352), (128, 32, 160), (64, 64, 480)]
)
def test_tiles_of_columns_end_with_their_group(row, column, end):
    from nybble.kernels.cuda import launch_fp8

    descriptor = launch_fp8._ending_columns(torch.empty(144, 480, dtype=FP8), 128)
    for r in range(row, row + 128, 5):
        for c in (column + step for step in STEPS):
            at = (launch_fp8.WRAP, end // 32, r, launch_fp8.HUGE - (end - c))
            assert offset(descriptor, at) == (r * 480 + c if r < 144 and c < end else None), (r, c)


@pytest.mark.parametrize(("row", "column", "stop"), [(0, 0, 64), (37, 128, 80), (5, 0, 6), (200, 128, 300)])
def test_tiles_of_rows_end_with_their_group(row, column, stop):
    from nybble.kernels.cuda import launch_fp8

    descriptor = launch_fp8.ending_rows(torch.empty(300, 208, dtype=torch.bfloat16))
    for r in range(row, row + 64):
        for c in (column + step for step in STEPS):
            at = (launch_fp8.HUGE, stop, launch_fp8.HUGE - (stop - r), c)
            assert offset(descriptor, at) == (r * 208 + c if r < stop and c < 208 else None), (r, c)
