"""Signed zeros, NaN, infinities, subnormals, the largest numbers, and shapes that do not fit blocks."""

import math

import pytest
import torch

import nybble
from nybble.formats import e2m1, get, names

ALL = names()
BLOCKED = [n for n in ALL if not get(n).passthrough]
FLT_MAX = torch.finfo(torch.float32).max


def codes_of(q: nybble.QTensor) -> torch.Tensor:
    return e2m1.unpack(q.codes, q.shape[q.axis]) if q.spec.packed else q.codes


@pytest.mark.parametrize("format", ALL)
def test_a_zero_tensor_is_zero_and_keeps_its_signs(format):
    x = torch.zeros(16, 64)
    x[:, ::2] = -0.0
    q = nybble.quantize(x, format)
    y = q.dequantize()
    assert torch.equal(y, x)
    assert torch.equal(torch.signbit(y), torch.signbit(x))
    assert torch.isfinite(q.tensor_scale).all()
    if q.spec.scale in ("e4m3", "e8m0"):
        assert not q.scales.any()
    else:
        assert (q.scales == 1).all()  # of FP8; other formats have none


@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_makes_its_block_nan_and_no_other(format, poison):
    fmt = get(format)
    height, width = (140, 260) if fmt.block_cols == 128 else (20, 70)
    x = torch.randn(height, width, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1e3  # the outer maximum is not the bad value's
    clean = nybble.quantize(x, format)
    x[-3, -5] = poison
    q = nybble.quantize(x, format)
    rows, cols = fmt.block_rows, fmt.block_cols or width
    bad = torch.zeros(height, width, dtype=torch.bool)
    r, c = (height - 3) // rows, (width - 5) // cols
    bad[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols] = True
    assert torch.equal(torch.isnan(q.dequantize()), bad)
    assert torch.equal(q.dequantize()[~bad], clean.dequantize()[~bad])
    assert torch.equal(q.amax, clean.amax)
    assert (codes_of(q)[bad] == (0 if fmt.packed else 0x7F)).all()
    scale = q.scales[r, c]
    assert torch.isnan(scale) if fmt.scale == "fp32" else scale == {"e4m3": 0x7F, "e8m0": 255}[fmt.scale]


def test_outer_maxima_are_taken_over_finite_values():
    x = torch.tensor([[float("inf"), 3.0], [float("nan"), float("nan")]])
    assert nybble.quantize(x, "nvfp4").amax == 3
    q = nybble.quantize(x, "nvfp4", outer="row")
    assert q.amax.tolist() == [3, 0]
    assert torch.isnan(q.dequantize()).all()


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_bad_values_pass_through_alone(format):
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    y = nybble.quantize(x, format).dequantize()
    assert torch.equal(y.nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize("scale", [FLT_MAX, 1e38, 1e-30, 1e-38, 1e-42, 1e-45])
def test_huge_and_tiny_tensors_stay_finite(format, scale):
    x = torch.linspace(-1, 1, 64).repeat(2, 1) * torch.tensor(scale)
    for rounding in ("nearest", "stochastic"):
        key = nybble.key(0) if rounding == "stochastic" else None
        y = nybble.quantize(x, format, rounding=rounding, key=key).dequantize()
        assert not torch.isnan(y).any()
        # rounding up from FLT_MAX may pass it; everything else stays below
        assert torch.isfinite(y).all() or scale == FLT_MAX
        if scale > 1e-36:
            assert ((y - x)[torch.isfinite(y)].abs() <= x.abs().max() / 2).all()


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("shape", [(0,), (0, 16), (16, 0), (0, 0), (2, 0, 8), (0, 3, 5)])
def test_empty_tensors(format, shape):
    for axis in range(-len(shape), 0):
        if axis < -2 and get(format).square:
            continue
        q = nybble.quantize(torch.empty(shape), format, axis=axis)
        assert q.dequantize().shape == shape
        assert (q.amax == 0).all()
        assert math.isfinite(q.bits_per_value)


@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize("length", [1, 2, 15, 17, 31, 33, 127, 129])
def test_a_tail_is_a_block_of_its_own(format, length):
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    q = nybble.quantize(x, format)
    cols = q.spec.block_cols or length
    assert q.scales.shape[-1] == -(-length // cols)
    start = (length - 1) // cols * cols
    if q.spec.two_level:  # the outer scale must be that of the whole
        x[0, start] = q.amax
        q = nybble.quantize(x, format)
    tail = nybble.quantize(x[:, start:].contiguous(), format)
    if not q.spec.two_level or torch.equal(tail.amax, q.amax):
        assert torch.equal(codes_of(q)[:, start:], codes_of(tail))
        assert torch.equal(q.scales[:, -1:], tail.scales)
    if q.spec.packed and length % 2:
        assert (q.codes[:, -1] >> 4 == 0).all()


@pytest.mark.parametrize("format", ALL)
def test_strides_do_not_matter(format):
    base = torch.randn(40, 72, generator=torch.Generator().manual_seed(1))
    views = [
        base.t(),
        base[::3, 1::2],
        base[:, :1].expand(40, 50),
        base[5].expand(18, 72),
        base.flip(0)[2:, 3:],
    ]
    for view in views:
        for axis in (-1, -2):
            a, b = (nybble.quantize(v, format, axis=axis) for v in (view, view.contiguous()))
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
            assert torch.equal(a.dequantize(), b.dequantize())
            assert a.codes.is_contiguous()


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_equal_their_fp32_values(format, dtype):
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    a, b = nybble.quantize(x, format), nybble.quantize(x.float(), format)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.amax, b.amax)


def test_inputs_that_require_gradients_and_outputs_do_not_alias():
    x = torch.randn(4, 32).bfloat16()
    q = nybble.quantize(x, "bf16")
    assert q.codes.data_ptr() != x.data_ptr()
    assert q.dequantize(torch.bfloat16).data_ptr() != q.codes.data_ptr()
    grad = torch.randn(4, 32, requires_grad=True)
    assert torch.equal(nybble.quantize(grad, "nvfp4").codes, nybble.quantize(grad.detach(), "nvfp4").codes)
