"""The reference against element-at-a-time code: tails, square blocks, axes, roundings, outer scales."""

import naive_formats as naive
import numpy as np
import pytest
import torch

from nybble.formats import blocks, e2m1, get, names, philox, reference

KEY = torch.tensor([12345, 6, 0])
BLOCKED = [name for name in names() if not get(name).passthrough]


def sample(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Values over many binades, some zero: every regime of the scales is met."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-8, 4, shape, generator=g).float())
    return torch.where(torch.rand(shape, generator=g) < 0.1, 0.0, x)


def block_of(format: str, xs: list, amax: np.floating, draws: list | None):
    fmt = get(format)
    if fmt.four_over_six:
        return naive.four_over_six_block(xs, amax, draws)
    if fmt.two_level:
        return naive.nvfp4_block(xs, amax, draws)
    if fmt.scale == "e8m0":
        return naive.mx_block(xs, fmt.element, fmt.scale_rule, draws)
    return naive.fp8_block(xs, draws)


def naive_matrix(x: np.ndarray, format: str, axis: int, outer: str, draws: np.ndarray | None):
    """Codes, one a byte, in the logical layout, and scales in the stored one."""
    fmt = get(format)
    along = x.shape[axis]
    cols, rows = blocks.cols_of(fmt, along), fmt.block_rows
    height, width = (cols, rows) if axis == -2 else (rows, cols)
    codes = np.zeros(x.shape, np.uint8)
    grid = -(-x.shape[0] // height), -(-x.shape[1] // width)
    scales = np.zeros(grid, np.float32 if fmt.scale == "fp32" else np.uint8)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            part = x[at]
            if outer == "row":
                amax = np.abs(x[:, at[1]] if axis == -2 else x[at[0]]).max()
            else:
                amax = np.abs(x).max()
            if fmt.outer_pow2:
                amax = naive.power_of_two(amax, 1536 if fmt.four_over_six else 2688)
            got, scale = block_of(
                format, list(part.flatten()), amax, None if draws is None else list(draws[at].flatten())
            )
            codes[at] = np.array(got, np.uint8).reshape(part.shape)
            scales[i, j] = scale
    return codes, scales.T if axis == -2 else scales


@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_format_equals_the_naive_one(format, axis, rounding):
    fmt = get(format)
    shape = (130, 9) if fmt.block_rows == 128 else (3, 140) if fmt.block_cols == 128 else (19, 37)
    shape = shape if axis == -1 else shape[::-1]
    for outer in ["tensor"] if fmt.square or not fmt.two_level else ["tensor", "row"]:
        x = sample(shape)
        draws = philox.draws(KEY, shape, 7, 3).numpy() if rounding == "stochastic" else None
        codes, scales, _ = reference.quantize(
            x, format, axis, rounding, outer, KEY if draws is not None else None, 7, 3
        )
        want_codes, want_scales = naive_matrix(x.numpy(), format, axis, outer, draws)
        stored = e2m1.unpack(codes, shape[axis]) if fmt.packed else codes
        assert np.array_equal((stored.T if axis == -2 else stored).numpy(), want_codes)
        assert np.array_equal(scales.numpy(), want_scales)


NEAR_TIES = 16 * torch.tensor([  # added up in the other order, the other candidate of Four Over Six wins
    [-1.3125, -2.125, 0.8125, 0.1875, -0.8125, 0.8125, -2.3125, 1.5,
     2.1875, 1.375, 0.625, 1.0, 0.8125, -2.5, 1.8125, -1.75],
    [1.4375, 1.125, -0.875, -0.375, -2.125, 2.5, 0.9375, 0.25,
     -0.0625, 0.5625, -2.25, -2.4375, -2.4375, 1.0625, -1.5625, -0.4375],
    [-3.25, -2.125, -0.25, -4.875, 2.75, -3.875, -3.25, 3.75,
     -1.25, -4.875, 3.0, 0.75, 2.75, 4.0, -3.25, -1.375],
    [0.15625, 0.375, 0.03125, -0.8125, 0.71875, -0.3125, 0.375, -0.59375,
     0.625, -0.1875, 0.65625, -1.21875, 0.09375, 0.0625, 0.5, 0.96875],
])  # fmt: skip


def test_four_over_six_adds_errors_in_order():
    x = torch.cat([NEAR_TIES, torch.full((1, 16), 160.0)])  # the last row holds the outer maximum
    codes, scales, amax = reference.quantize(x, "nvfp4-4over6")
    backwards = reference.quantize(x.flip(-1), "nvfp4-4over6")[1]
    for i in range(4):
        want, scale = naive.four_over_six_block(list(x[i].numpy()), amax.numpy())
        assert e2m1.unpack(codes, 16)[i].tolist() == want
        assert scales[i, 0] == scale != backwards[i, 0]


def test_square_four_over_six_adds_errors_in_logical_order_along_both_axes():
    g = torch.Generator().manual_seed(0)
    tiles = torch.zeros(4000, 16, 16)
    tiles[:, :4, :4] = torch.randint(-40, 41, (4000, 4, 4), generator=g) / 8
    x = torch.cat([tiles.flatten(0, 1), torch.full((16, 16), 10.0)])
    last, second = (reference.quantize(x, "nvfp4-16x16-4over6", axis)[1] for axis in (-1, -2))
    transposed = reference.quantize(x.t(), "nvfp4-16x16-4over6", -1)[1]
    assert torch.equal(last.t(), second)
    assert not torch.equal(last.t(), transposed)  # there are ties that the order decides


@pytest.mark.parametrize("format", ["nvfp4-16x16", "nvfp4-16x16-4over6", "fp8-128x128"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_square_blocks_are_the_same_along_both_axes(format, rounding):
    x = sample((45, 70))
    key = KEY if rounding == "stochastic" else None
    values = [
        reference.fake_quantize(x, format, torch.float32, axis, rounding, "tensor", key)[0]
        for axis in (-1, -2)
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize("format", [n for n in BLOCKED if n != "nvfp4-16x16-4over6"])
def test_the_second_last_axis_is_the_transpose_of_the_last(format):
    x = sample((33, 50))
    along_rows = reference.quantize(x, format, -2)
    transposed = reference.quantize(x.t().contiguous(), format, -1)
    assert all(torch.equal(a, b) for a, b in zip(along_rows, transposed, strict=True))


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-4over6", "nvfp4-16x16"])
def test_matrix_scales_are_those_of_each_matrix_alone(format):
    x = sample((3, 20, 40)) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    for axis in (-1, -2):
        codes, scales, amax = reference.quantize(x, format, axis, "nearest", "matrix")
        for e in range(3):
            alone = reference.quantize(x[e], format, axis)
            assert torch.equal(codes[e], alone[0])
            assert torch.equal(scales[e], alone[1])
            assert amax[e] == alone[2]
        values = reference.dequantize(codes, scales, amax, format, axis, x.shape, torch.float32, "matrix")
        assert torch.equal(values[2], reference.dequantize(*alone, format, axis, x.shape[1:], torch.float32))


def test_dequantised_values_are_one_product_then_the_outer_scale():
    x = sample((9, 48))
    for outer in ("tensor", "row"):
        codes, scales, amax = reference.quantize(x, "nvfp4", -1, "nearest", outer)
        product = e2m1.decode(e2m1.unpack(codes, 48)).numpy() * np.repeat(
            np.array([naive.value(int(s), "e4m3") for s in scales.flatten()], np.float32).reshape(9, 3), 16, 1
        )
        s_dec = np.float32(1) / (np.float32(2688) / amax.numpy())
        want = product * (s_dec[:, None] if outer == "row" else s_dec)
        assert np.array_equal(
            reference.dequantize(codes, scales, amax, "nvfp4", -1, [9, 48], torch.float32, outer), want
        )
        bare = reference.dequantize(codes, scales, amax, "nvfp4", -1, [9, 48], torch.float32, outer, False)
        assert np.array_equal(bare.numpy(), product)


def test_a_tokens_numbers_do_not_depend_on_its_batch():
    x = sample((8, 64))
    whole = reference.quantize(x, "nvfp4", -1, "nearest", "row")
    for i in range(8):
        alone = reference.quantize(x[i : i + 1], "nvfp4", -1, "nearest", "row")
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("format", [n for n in BLOCKED if not get(n).square])
def test_rows_carry_their_draws_wherever_they_land(format):
    x = sample((24, 40))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    whole = reference.quantize(x, format, -1, "stochastic", "row", KEY, 1, 2)
    moved = reference.quantize(x[order], format, -1, "stochastic", "row", KEY, 1, 2, order)
    for a, b in zip(whole, moved, strict=True):
        assert torch.equal(a[order] if a.numel() else a, b)
