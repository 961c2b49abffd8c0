"""Stochastic rounding has no bias, moves nothing that is representable, and follows its key alone."""

import pytest
import torch

import nybble
from nybble.formats import get, names

UNSATURATED = ["mxfp8", "mxfp4", "fp8-1x128"]  # scales that no element exceeds


@pytest.mark.parametrize("format", UNSATURATED)
def test_the_mean_over_4096_keys_is_the_value(format):
    x = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
    n = 4096
    tiled = x.repeat(n, 1)  # the draws of every row are its own
    q = nybble.quantize(tiled, format, rounding="stochastic", key=nybble.key(5))
    values = q.dequantize().double()
    error = values.mean(0) - x.double()
    # 4 sigma of each mean, and half a draw (2^-17 of a step), and one rounding of an FP8 scale's reciprocal
    step = (values.amax(0) - values.amin(0)).clamp(min=1e-30)
    sigma = values.std(0) / n**0.5
    assert ((values.std(0) > 0).float().mean()) > 0.9
    assert (error.abs() < 4 * sigma + step * 2**-17 + x.abs() * 2**-22).float().mean() > 0.99
    assert error.abs().max() < 6 * sigma.max()
    assert abs((error / sigma.clamp(min=1e-30))[sigma > 0].mean()) < 4 / (sigma > 0).sum() ** 0.5


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-16x16"])
def test_nvfp4_elements_below_the_block_maximum_are_unbiased(format):
    """The maximum itself may saturate when its scale is rounded down; everything else must not drift."""
    x = torch.rand(16, 16, generator=torch.Generator().manual_seed(2)) - 0.5
    x[:, 0] = 1.0
    n = 4096
    stacked = x.repeat(n, 1)  # every copy has draws of its own and blocks of its own
    values = nybble.quantize(stacked, format, rounding="stochastic", key=nybble.key(9)).dequantize()
    values = values.double().unflatten(0, (n, 16))
    error, sigma = values.mean(0) - x.double(), values.std(0) / n**0.5
    outside = (error.abs() > 4 * sigma + 1e-6)[:, 1:]
    assert outside.sum() <= 1  # 240 trials at 4 sigma: 0.015 expected
    assert values.std(0)[:, 1:].min() > 0


def test_e2m1_block_of_one_value_splits_as_its_fraction_says():
    x = torch.full((4096, 32), 2.25)
    x[:, 0] = 6.0  # holds the scale at 1
    q = nybble.quantize(x, "mxfp4", rounding="stochastic", key=nybble.key(0))
    values = q.dequantize()[:, 1:]
    assert set(values.unique().tolist()) == {2.0, 3.0}
    share, n = (values == 2).double().mean().item(), values.numel()
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / n) ** 0.5


@pytest.mark.parametrize("format", [n for n in names() if not get(n).passthrough])
def test_every_part_of_the_key_changes_the_codes_and_equal_keys_do_not(format):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    fields = {"seed": 1, "step": 2, "layer": 3, "operand": 4, "micro": 5}
    codes = nybble.quantize(x, format, rounding="stochastic", key=nybble.key(**fields)).codes
    assert torch.equal(
        codes, nybble.quantize(x, format, rounding="stochastic", key=nybble.key(**fields)).codes
    )
    for field in fields:
        other = nybble.key(**(fields | {field: fields[field] + 1}))
        assert not torch.equal(codes, nybble.quantize(x, format, rounding="stochastic", key=other).codes)
    assert codes.any()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp8-floor"])
def test_representable_values_never_move(format):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    once = nybble.quantize(x, format).dequantize()
    for step in range(8):
        again = nybble.quantize(once, format, rounding="stochastic", key=nybble.key(1, step)).dequantize()
        assert torch.equal(again, once)


def test_the_draws_do_not_depend_on_the_quantised_axis():
    """Blocks of one value: both axes see the same scales, so equal draws give equal values."""
    x = torch.full((64, 96), 1.1)
    key = nybble.key(1, 2, 3, 4)
    a, b = (
        nybble.quantize(x, "mxfp8", axis=axis, rounding="stochastic", key=key).dequantize() for axis in (0, 1)
    )
    assert torch.equal(a, b)
    assert a.unique().numel() == 2


def test_errors_of_neighbouring_elements_are_uncorrelated():
    x = torch.full((512, 64), 1.0 + 1 / 16)  # halfway between two E4M3 values
    error = nybble.quantize(x, "mxfp8", rounding="stochastic", key=nybble.key(3)).dequantize() - x
    e = error.sign().double()
    limit = 4 / e.numel() ** 0.5
    assert abs(e.mean()) < limit
    for shift in (1, 2, 8, 31, 32):
        assert abs((e[:, :-shift] * e[:, shift:]).mean()) < limit * 1.5  # fewer pairs than elements
        assert abs((e[:-shift] * e[shift:]).mean()) < limit * 1.5
