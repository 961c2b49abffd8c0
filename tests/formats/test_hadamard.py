"""The Hadamard transform is orthogonal, has the stated bits, and MS-EDEN behind it is unbiased."""

import pytest
import torch

import nybble
from nybble.errors import NybbleError
from nybble.formats import get, hadamard, ops, reference
from nybble.formats.outer import decode_scale

KEY = torch.tensor([5, 7, 0])


def integers(*shape, seed=0):
    """Whole numbers so small that every sum of a transform of 16 is exact."""
    return torch.randint(-63, 64, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("key", [None, KEY], ids=["fixed", "drawn"])
def test_the_pair_cancels_exactly_in_fp32(key):
    """(H a).T (H b) = a.T b to the last bit where FP32 holds every partial sum, for short runs too."""
    a, b = integers(52, 24), integers(52, 40, seed=1)
    ta, tb = (ops.hadamard(t, -2, 16, key, 3, 68) for t in (a, b))
    assert ta.shape == (64, 24)
    assert torch.equal(ta.t() @ tb, a.t() @ b)


def test_groups_cancel_too_and_begin_runs_of_their_own():
    offs = torch.tensor([0, 5, 5, 38, 50], dtype=torch.int32)
    a, b = integers(52, 8), integers(52, 12, seed=1)
    ta, tb = (ops.hadamard(t, -2, 16, None, 0, 0, offs) for t in (a, b))
    ends = hadamard.transformed_ends(offs, 16).tolist()
    assert ends == [0, 16, 16, 64, 80]
    starts, before = [0, *offs.tolist()], [0, *ends]
    for g in range(5):
        part, whole = slice(before[g], ends[g]), slice(starts[g], starts[g + 1])
        assert torch.equal(ta[part].t() @ tb[part], a[whole].t() @ b[whole])
    assert not ta[80:].any()


def test_sixteen_values_have_the_published_matrix():
    """Sylvester's H / 4 times the diagonal of TransformerEngine's signs."""
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    assert torch.equal(ops.hadamard(torch.eye(16), -1, 16), (h / 4 * signs).t())


def test_drawn_signs_follow_step_and_layer_but_not_the_micro_batch():
    def signs(seed=5, step=7, micro=0, layer=1):
        return hadamard.signs(128, torch.device("cpu"), torch.tensor([seed, step, micro]), layer, 68)

    assert torch.equal(signs(), signs(micro=3))
    assert not torch.equal(signs(), signs(step=8))
    assert not torch.equal(signs(), signs(layer=2))
    assert set(signs().tolist()) == {1.0, -1.0}


def test_tokens_of_a_group_keep_their_draws_wherever_the_group_lies():
    rows = torch.tensor([9, 4, 7, 30, 31])
    alone = hadamard.transformed_rows(rows[2:], torch.tensor([3], dtype=torch.int32), 3, 16)
    behind = hadamard.transformed_rows(rows, torch.tensor([2, 5], dtype=torch.int32), 5, 16)
    assert torch.equal(alone[:16], behind[16:32])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 4), -1, 8), "16, 32, 64, 128, not 8"),
        ((torch.zeros(4, 4), 0, 16), "axis must be -1 or -2"),
        ((torch.zeros(4, 4, dtype=torch.int32), -1, 16), "not int32"),
        ((torch.zeros(4, 4), -1, 16, None, 0, 0, torch.tensor([4], dtype=torch.int32)), "offs must be int32"),
    ],
)
def test_bad_arguments_name_themselves(arguments, message):
    with pytest.raises(NybbleError, match=message):
        ops.hadamard(*arguments)


def test_ms_eden_is_unbiased_over_signs_and_draws():
    """Each value within 4 sigma of its mean, the length within 4 sigma of itself, at half the error of SR."""
    x = torch.distributions.StudentT(torch.tensor(4.0))
    torch.manual_seed(2)
    x, n = x.sample((128,)), 512
    values, signs = [], []
    for step in range(n):
        key = torch.tensor([3, step, 0])
        y = ops.hadamard(x[None], -1, 128, key, 1, 66)
        v, amax = ops.fake_quantize(y, "nvfp4", torch.float32, -1, "eden", "tensor", key, 1, 2)
        values.append(v * decode_scale(get("nvfp4"), amax))
        signs.append(hadamard.signs(128, x.device, key, 1, 66))
    fixed = hadamard.signs(128, x.device, None, 0, 0)
    back = (
        ops.hadamard(torch.cat(values) * fixed, -1, 128) * torch.stack(signs)
    ).double()  # H is its inverse
    sigma = back.std(0) / n**0.5
    error = (back.mean(0) - x) / sigma
    assert error.abs().max() < 4
    assert error.square().mean() < 1.6  # 128 values: 1 +- 4 * sqrt(2 / 128)
    length = back @ x.double() / x.double().dot(x.double())
    assert abs(length.mean() - 1) < 4 * length.std() / n**0.5
    keys = [nybble.key(3, step) for step in range(64)]
    plain = torch.cat(
        [nybble.quantize(x[None], "nvfp4", rounding="stochastic", key=k).dequantize() for k in keys]
    )
    assert (back - x).square().mean() < 0.65 * (plain - x).square().mean()


def test_ms_eden_corrects_lengths_by_scales_alone():
    """Draws change scales by one E4M3 step at most, and no code."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    first, second = (
        reference.quantize(x, "nvfp4", -1, "eden", "row", torch.tensor([1, step, 0])) for step in (0, 1)
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert 0 < (first[1] != second[1]).float().mean() < 1
    assert (first[1].int() - second[1].int()).abs().max() == 1


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4-16x16", "nvfp4-4over6"])
def test_ms_eden_is_for_nvfp4(format):
    with pytest.raises(NybbleError, match="MS-EDEN rounds to nvfp4"):
        nybble.quantize(torch.zeros(16, 16), format, rounding="eden", key=nybble.key(0))


@pytest.mark.parametrize("format", ["nvfp4-pow2", "nvfp4-4over6-pow2"])
def test_power_of_two_outer_scales_make_most_rerounded_values_exact(format):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    q = nybble.quantize(x, format, outer="row")
    exponent = torch.log2(q.encode_scale)
    assert torch.equal(exponent, exponent.round())
    nearest = get(format).outer_max / x.abs().amax(-1)
    assert ((q.encode_scale <= nearest) & (nearest < 2 * q.encode_scale)).all()

    def exact(quantised):
        again = quantised.requantize("mxfp8", axis=0)
        return (again.dequantize() == quantised.dequantize()).float().mean()

    assert exact(q) > 0.7
    assert exact(nybble.quantize(x, format.removesuffix("-pow2"), outer="row")) < 0.3


def test_power_of_two_outer_scales_of_extreme_tensors_are_finite():
    for top in (0.0, 1e-45, 3.4e38):
        q = nybble.quantize(torch.full((2, 16), top), "nvfp4-pow2")
        assert torch.isfinite(q.tensor_scale).all()
        assert torch.isfinite(q.dequantize()).all()
