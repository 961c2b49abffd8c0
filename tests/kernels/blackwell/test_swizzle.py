"""The swizzled layout against its formula, element by element; no element of the package computes it here."""

import pytest
import torch
from blackwell_emulation import offset, up
from torch.utils._python_dispatch import TorchDispatchMode

from nybble.errors import NybbleError
from nybble.kernels.blackwell import Swizzled, swizzle, swizzle_column_groups, swizzle_row_groups
from nybble.kernels.blackwell.swizzle import unswizzle

SIZES = [0, 1, 7, 33, 128, 129]


def random_scales(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)  # never 0, which is padding


def by_formula(scales: torch.Tensor) -> list[int]:
    rows, cols = scales.shape
    out = [0] * (up(rows, 128) * up(cols, 4))
    for r in range(rows):
        for c in range(cols):
            out[offset(r, c, cols)] = int(scales[r, c])
    return out


@pytest.mark.parametrize("rows", [1, 31, 128, 129, 300])
@pytest.mark.parametrize("cols", [1, 3, 4, 5, 13])
def test_every_scale_lies_where_the_formula_says_and_padding_is_zero(rows, cols):
    scales = random_scales(rows, cols)
    out = swizzle(scales)
    assert out.data.is_contiguous()
    assert (out.rows, out.cols) == (up(rows, 128), up(cols, 4))
    assert out.data.tolist() == by_formula(scales)
    assert torch.equal(unswizzle(out, rows, cols), scales)


def test_a_known_tile():
    # Row 33 of column 2 in the second row of tiles of two columns of tiles: 2 * 512 + 1 * 16 + 1 * 4 + 2.
    scales = torch.zeros(200, 8, dtype=torch.uint8)
    scales[128 + 33, 2] = 9
    assert swizzle(scales).data.nonzero().tolist() == [[2 * 512 + 16 + 4 + 2]]


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0)])
def test_matrices_without_scales(shape):
    out = swizzle(torch.zeros(shape, dtype=torch.uint8))
    assert out.data.numel() == 0
    assert unswizzle(out, *shape).shape == shape


def test_each_matrix_of_a_stack_is_swizzled_by_itself():
    scales = random_scales(3, 130, 6)
    out = swizzle(scales)
    assert out.data.shape == (3, 256 * 8)
    assert out.data.tolist() == [by_formula(matrix) for matrix in scales]
    assert torch.equal(unswizzle(out, 130, 6), scales)


def test_strided_scales_are_read_as_the_matrix_that_they_are():
    scales = random_scales(6, 140).t()
    assert swizzle(scales).data.tolist() == by_formula(scales)


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1], [0, 0, 0], [256, 0, 128], [7]])
@pytest.mark.parametrize("cols", [1, 4, 6])
@pytest.mark.parametrize("beyond", [0, 5])
def test_row_groups_are_padded_to_128_and_follow_each_other(order, cols, beyond):
    scales = random_scales(sum(order) + beyond, cols)
    ends = torch.tensor(order).cumsum(0).to(torch.int32)
    out = swizzle_row_groups(scales, ends)
    want, start = [], 0
    for size in order:
        want += by_formula(scales[start : start + size])
        start += size
    assert out.rows == 128 * (len(scales) // 128 + len(order))
    got = out.data.tolist()
    assert got[: len(want)] == want
    assert not any(got[len(want) :])


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1], [0, 0, 0], [8, 0, 4], [7]])
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("beyond", [0, 3])
def test_column_groups_are_padded_to_4_and_tiles_of_a_group_lie_together(order, rows, beyond):
    scales = random_scales(rows, sum(order) + beyond)
    ends = torch.tensor(order).cumsum(0).to(torch.int32)
    out = swizzle_column_groups(scales, ends)
    want, start = [], 0
    for size in order:
        want += by_formula(scales[:, start : start + size])
        start += size
    assert out.cols == 4 * (scales.shape[1] // 4 + len(order))
    got = out.data.tolist()
    assert len(got) == out.rows * out.cols
    assert got[: len(want)] == want
    assert not any(got[len(want) :])


@pytest.mark.parametrize("grouped", [swizzle_row_groups, swizzle_column_groups])
def test_grouped_layouts_read_nothing_back_from_the_device(grouped):
    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "item" not in str(func)
            assert "_local_scalar_dense" not in str(func)
            assert "nonzero" not in str(func)
            return func(*args, **(kwargs or {}))

    with NoSync():
        grouped(random_scales(40, 40), torch.tensor([3, 3, 40], dtype=torch.int32))


@pytest.mark.parametrize("grouped", [swizzle_row_groups, swizzle_column_groups])
def test_shapes_do_not_depend_on_where_groups_end(grouped):
    scales = random_scales(200, 200)
    shapes = {
        grouped(scales, torch.tensor(ends)).data.shape for ends in ([0, 0, 0], [1, 129, 200], [67, 134, 200])
    }
    assert len(shapes) == 1


def test_what_is_no_scale_matrix_is_refused():
    with pytest.raises(NybbleError, match=r"float32.*uint8"):
        swizzle(torch.ones(4, 4))
    with pytest.raises(NybbleError, match="128 x 4 do not hold a matrix of 129 x 4"):
        unswizzle(Swizzled(torch.zeros(512, dtype=torch.uint8), 128, 4), 129, 4)
