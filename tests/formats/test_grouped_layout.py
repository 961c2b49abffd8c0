"""Token groups: no block spans two experts, padding is zero, and each group is as it would be alone."""

import pytest
import torch
from naive_formats import draw

import nybble
from nybble.formats import blocks, e2m1, get, grouped, names, reference

ROW_BLOCKS = [n for n in names() if not get(n).square and get(n).block_cols is not None]
KEY = torch.tensor([77, 1, 2])
SPLITS = [[5, 0, 16, 1, 33], [0, 0, 7], [64], [0], [32, 32], [1] * 20, [16, 17, 31, 128]]


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.cumsum(torch.tensor(sizes), 0).to(torch.int32)


def tokens(sizes: list[int], extra: int = 0, cols: int = 24) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sum(sizes) + extra, cols, generator=g) * torch.exp2(
        torch.randint(-6, 6, (sum(sizes) + extra, 1), generator=g).float()
    )


@pytest.mark.parametrize("format", ROW_BLOCKS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_along_tokens_each_group_is_quantised_alone(format, sizes):
    fmt = get(format)
    block = fmt.block_cols
    x, offs = tokens(sizes, extra=3), ends(sizes)
    codes, scales, amax = reference.quantize(x, format, -2, "nearest", "matrix", offs=offs)
    total = block * ((sum(sizes) + 3) // block + len(sizes))
    assert list(codes.shape) == blocks.code_shape(fmt, [24, total])
    codes = e2m1.unpack(codes, total) if fmt.packed else codes
    at = start = 0
    for g, n in enumerate(sizes):
        alone = reference.quantize(x[start : start + n], format, -2)
        width = -(-n // block) * block
        own = e2m1.unpack(alone[0], n) if fmt.packed else alone[0]
        assert torch.equal(codes[:, at : at + n], own)
        assert not codes[:, at + n : at + width].any()
        assert torch.equal(scales[:, at // block : (at + width) // block], alone[1])
        if fmt.two_level:
            assert amax[g] == alone[2]
        at, start = at + width, start + n
    assert not codes[:, at:].any()
    assert not scales[:, at // block :].any()


@pytest.mark.parametrize("format", ROW_BLOCKS)
def test_padding_of_a_block_with_nan_has_code_zero(format):
    sizes = [5, 0, 40, 3]
    x, offs = tokens(sizes), ends(sizes)
    x[:] = float("nan")
    fmt = get(format)
    codes, _, _ = reference.quantize(x, format, -2, "nearest", "matrix", offs=offs)
    where = grouped.packing(fmt, offs, sum(sizes))
    codes = e2m1.unpack(codes, where.size) if fmt.packed else codes
    assert int(where.holds.sum()) == sum(sizes)
    assert not codes[:, ~where.holds].any()
    if not fmt.packed:
        assert (codes[:, where.holds] == 0x7F).all()


@pytest.mark.parametrize("format", [n for n in names() if not get(n).square])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("outer", ["tensor", "row", "matrix"])
def test_grouped_values_are_close_and_rows_of_no_group_are_zero(format, axis, outer):
    if format == "fp8-row" and axis == -2:
        with pytest.raises(nybble.errors.NybbleError, match="fp8-1x128"):
            reference.quantize(tokens([3]), format, axis, offs=ends([3]))
        return
    sizes = [5, 0, 40, 3]
    x, offs = tokens(sizes, extra=4), ends(sizes)
    x[-1] = float("nan")  # belongs to nobody: must not be seen
    out = reference.quantize(x, format, axis, "nearest", outer, offs=offs)
    y = reference.dequantize(*out, format, axis, x.shape, torch.float32, outer, True, offs)
    assert not y[48:].any()
    assert (y - x)[:48].norm() < 0.25 * x[:48].norm()
    assert not torch.isnan(out[2]).any()
    values, amax = reference.fake_quantize(x, format, torch.float32, axis, "nearest", outer, offs=offs)
    bare = reference.dequantize(*out, format, axis, x.shape, torch.float32, outer, False, offs)
    assert torch.equal(values, bare)
    assert torch.equal(amax, out[2])


def test_matrix_scales_along_features_are_one_a_group():
    sizes = [4, 0, 9]
    x, offs = tokens(sizes), ends(sizes)
    codes, scales, amax = reference.quantize(x, "nvfp4", -1, "nearest", "matrix", offs=offs)
    for g, (a, b) in enumerate([(0, 4), (4, 4), (4, 13)]):
        alone = reference.quantize(x[a:b], "nvfp4")
        assert torch.equal(codes[a:b], alone[0])
        assert torch.equal(scales[a:b], alone[1])
        assert amax[g] == alone[2]


@pytest.mark.parametrize("axis", [-1, -2])
def test_draws_of_grouped_tokens_are_those_of_their_logical_rows(axis):
    sizes = [5, 20, 9]
    x, offs = torch.full((34, 24), 1.1), ends(sizes)
    x[0] = 1.75  # a block of its own magnitude changes no other draw
    grouped_values = reference.fake_quantize(
        x, "mxfp8", torch.float32, axis, "stochastic", "tensor", KEY, 1, 2, None, offs
    )[0]
    plain = reference.fake_quantize(x, "mxfp8", torch.float32, -1, "stochastic", "tensor", KEY, 1, 2)[0]
    assert torch.equal(grouped_values[5:], plain[5:])
    assert draw(24 * 6, 77, 1, 2, 1, 2) != draw(24 * 7, 77, 1, 2, 1, 2)


def test_rows_make_sorted_tokens_draw_as_unsorted_ones():
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    x = torch.full((30, 24), 1.1)
    sorted_values = reference.fake_quantize(
        x, "mxfp8", torch.float32, -2, "stochastic", "tensor", KEY, 1, 2, order, ends([7, 0, 23])
    )[0]
    plain = reference.fake_quantize(x, "mxfp8", torch.float32, -2, "stochastic", "tensor", KEY, 1, 2)[0]
    assert torch.equal(sorted_values, plain[order])


@pytest.mark.parametrize("format", ROW_BLOCKS)
def test_requantising_forward_codes_along_tokens_equals_quantising_their_values(format):
    sizes = [5, 0, 40, 3]
    x, offs = tokens(sizes), ends(sizes)
    forward = reference.quantize(x, "nvfp4", -1, "nearest", "row", offs=offs)
    source = reference.dequantize(*forward, "nvfp4", -1, x.shape, torch.float32, "row", True, offs)
    args = (format, -2, "stochastic", "matrix", KEY, 3, 5, None, offs)
    got = reference.requantize(*forward, "nvfp4", -1, "row", x.shape, *args)
    assert all(torch.equal(a, b) for a, b in zip(got, reference.quantize(source, *args), strict=True))
    values = reference.fake_requantize(
        *forward, "nvfp4", -1, "row", x.shape, format, -2, torch.float32, *args[2:]
    )
    direct = reference.dequantize(*got, format, -2, x.shape, torch.float32, "matrix", False, offs)
    assert torch.equal(values[0], direct)
    assert torch.equal(values[1], got[2])


def test_capacity_bounds_every_split():
    fmt = get("mxfp8")
    for sizes in [*SPLITS, [31] * 7, [33] * 5]:
        where = grouped.packing(fmt, ends(sizes), sum(sizes))
        assert where.column.max() < where.size if sum(sizes) else True
        assert where.size == blocks.capacity(fmt, sum(sizes), len(sizes))
        assert where.column.unique().numel() == sum(sizes)


def test_no_groups_at_all():
    x, offs = torch.randn(5, 16), torch.empty(0, dtype=torch.int32)
    for axis in (-1, -2):
        out = reference.quantize(x, "nvfp4", axis, "nearest", "matrix", offs=offs)
        y = reference.dequantize(*out, "nvfp4", axis, [5, 16], torch.float32, "matrix", True, offs)
        assert not y.any()
