"""The Python face: any axis, sizes, requantisation, and one clear sentence for every misuse."""

import numpy as np
import pytest
import torch

import nybble
from nybble.errors import NybbleError
from nybble.formats import get, names

X = torch.randn(4, 5, 6, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8-row", "fp8-1x128", "bf16", "fp32"])
@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_any_axis_equals_moving_it_last(format, outer):
    for x, axis in [(X, a) for a in range(-4, 4)] + [(X[0], a) for a in range(-3, 3)]:
        q = nybble.quantize(x, format, axis=axis, outer=outer)
        moved = nybble.quantize(x.movedim(axis, -1).contiguous(), format, outer=outer)
        assert torch.equal(q.codes, moved.codes)
        assert torch.equal(q.scales, moved.scales)
        assert torch.equal(q.amax, moved.amax)
        assert torch.equal(q.dequantize(), moved.dequantize().movedim(-1, axis))
        assert q.axis < 0
        assert q.shape == x.shape


def test_draws_are_named_by_the_element_along_any_axis():
    x = torch.full((32, 3, 4, 5), 1.1)
    key = nybble.key(1, 2, 3, 4)
    a, *others = (
        nybble.quantize(x, "mxfp8", axis=a, rounding="stochastic", key=key).dequantize() for a in range(4)
    )
    assert all(torch.equal(a, b) for b in others)
    assert a.unique().numel() == 2


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("to_axis", [0, 1, 2, 3])
def test_requantising_is_quantising_the_value(axis, to_axis):
    q = nybble.quantize(X, "nvfp4", axis=axis, outer="row")
    key = nybble.key(9, 1)
    r = q.requantize("mxfp8", axis=to_axis, rounding="stochastic", key=key)
    direct = nybble.quantize(q.dequantize(), "mxfp8", axis=to_axis, rounding="stochastic", key=key)
    assert torch.equal(r.codes, direct.codes)
    assert torch.equal(r.scales, direct.scales)


def test_requantising_with_groups_takes_the_old_ones_or_new_ones():
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    offs, other = (torch.tensor(o, dtype=torch.int32) for o in ([7, 40], [20, 30]))
    plain = nybble.quantize(x, "nvfp4", outer="row")
    grouped = nybble.quantize(x, "nvfp4", axis=0, outer="matrix", offs=offs)
    for source, given in ((plain, offs), (grouped, None), (grouped, other)):
        r = source.requantize("mxfp8", axis=0, offs=given)
        groups = offs if given is None else given
        direct = nybble.quantize(source.dequantize(), "mxfp8", axis=0, offs=groups)
        assert torch.equal(r.codes, direct.codes)
        assert torch.equal(r.dequantize(), direct.dequantize())
        assert torch.equal(r.offs, groups)


def test_sizes_are_what_the_format_promises():
    x = torch.randn(256, 1024)
    want = {
        "nvfp4": 4.5,
        "nvfp4-16x16": 4.03125,
        "mxfp4": 4.25,
        "mxfp8": 8.25,
        "fp8-1x128": 8.25,
        "bf16": 16,
        "fp32": 32,
    }
    for format, bits in want.items():
        q = nybble.quantize(x, format)
        assert get(format).bits_per_value == bits
        assert q.nbytes == q.codes.nbytes + q.scales.nbytes + q.amax.nbytes
        assert q.bits_per_value == pytest.approx(bits, abs=32 / x.numel() + 1e-9)
    assert nybble.quantize(x, "nvfp4", outer="row").bits_per_value == pytest.approx(4.5 + 32 / 1024)


def test_values_are_code_times_scale_times_tensor_scale():
    q = nybble.quantize(X[0, 0], "nvfp4", outer="row")
    assert torch.equal(q.dequantize(apply_outer=False) * q.tensor_scale[:, None], q.dequantize())
    assert q.tensor_scale.shape == q.amax.shape == (6,)
    single = nybble.quantize(X, "mxfp8")
    assert single.tensor_scale == 1
    assert torch.equal(single.dequantize(apply_outer=False), single.dequantize())
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-4over6", "mxfp4", "mxfp8"])
def test_values_without_the_outer_scale_are_exact_in_bfloat16(format):
    q = nybble.quantize(X, format, outer="row")
    values = q.dequantize(torch.float32, apply_outer=False)
    assert torch.equal(q.dequantize(torch.bfloat16, apply_outer=False).float(), values)


def test_to_moves_every_part():
    q = nybble.quantize(X[0, 0], "nvfp4", axis=0, offs=torch.tensor([6], dtype=torch.int32)).to("meta")
    assert {t.device.type for t in (q.codes, q.scales, q.amax, q.offs)} == {"meta"}
    assert q.format == "nvfp4"


def test_the_table_names_every_format_once():
    assert nybble.formats.names() == [f.name for f in map(get, names())]
    assert len(set(names())) == len(names()) == 15


OFFS = torch.tensor([4], dtype=torch.int32)
MISUSE = [
    ({"format": "nvfp5"}, "unknown format 'nvfp5'; choose one of nvfp4,"),
    ({"format": None}, "unknown format None"),
    ({"rounding": "up"}, "unknown rounding 'up'; choose one of nearest, stochastic"),
    ({"outer": "token"}, "unknown outer scale 'token'; choose one of tensor, row, matrix"),
    ({"rounding": "stochastic"}, "stochastic rounding needs a key"),
    ({"key": nybble.key(0)}, "a key does nothing"),
    ({"x": torch.ones(4, 16, dtype=torch.int64)}, "not int64"),
    ({"x": torch.ones(4, 16, dtype=torch.float64)}, "not float64"),
    ({"x": torch.ones(4, 16, dtype=torch.bool)}, "not bool"),
    ({"x": torch.tensor(1.0)}, "without dimensions"),
    ({"x": [1.0, 2.0]}, "a dense torch.Tensor, not list"),
    ({"x": torch.ones(4, 16).to_sparse()}, "a dense torch.Tensor, not one of layout torch.sparse_coo"),
    ({"rounding": "stochastic", "key": 5}, "key must be nybble.key(seed, step, layer, operand), not 5"),
    ({"axis": 2}, "axis 2 does not exist in a tensor of 2 dimensions"),
    ({"x": torch.ones(4), "axis": -2}, "axis -2 does not exist in a tensor of 1 dimensions"),
    ({"format": "nvfp4-16x16", "outer": "row"}, 'outer="row" does not fit'),
    ({"format": "nvfp4-16x16", "offs": OFFS}, "cannot follow token groups"),
    ({"format": "fp8-row", "axis": 0, "offs": OFFS}, "no grouped layout"),
    ({"format": "bf16", "rounding": "stochastic", "key": nybble.key(0)}, "cannot be rounded stochastically"),
    ({"offs": torch.tensor([4])}, "offs must be int32"),
    ({"x": torch.ones(2, 4, 16), "offs": OFFS}, "goes with a tensor of two"),
    ({"rows": torch.arange(3), "rounding": "stochastic", "key": nybble.key(0)}, "one row index for each row"),
    ({"x": torch.ones(2, 4, 16), "rows": torch.arange(2)}, "one row index for each row"),
    ({"x": torch.ones(2, 2, 2, 2), "outer": "matrix"}, "at most 3 dimensions"),
    ({"x": torch.ones(2, 4, 16), "axis": 0, "format": "nvfp4-16x16"}, "move the axis first"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISUSE, ids=[m[1][:30] for m in MISUSE])
def test_misuse_gets_one_clear_sentence(change, message):
    arguments = {"x": torch.ones(4, 16), "format": "nvfp4"} | change
    with pytest.raises(NybbleError) as info:
        nybble.quantize(**arguments)
    assert message in str(info.value)
    assert "\n" not in str(info.value)


def test_a_key_and_a_dtype_of_another_kind_are_named():
    with pytest.raises(NybbleError, match="step of a rounding key must be a whole number, not 'a'"):
        nybble.key(0, "a")
    assert nybble.key(np.int64(3)).seed == 3
    with pytest.raises(NybbleError, match=r"dtype must be a torch\.dtype such as .*, not 'float32'"):
        nybble.quantize(torch.ones(16), "mxfp8").dequantize("float32")


def test_a_quantised_tensor_is_shown_in_a_line():
    shown = repr(nybble.quantize(torch.ones(4, 32), "nvfp4", outer="row"))
    assert shown == "QTensor(nvfp4, shape=(4, 32), axis=-1, outer='row', 5.5 bits a value, device='cpu')"


@pytest.mark.parametrize(("field", "value"), [("layer", 1 << 24), ("operand", 256), ("layer", -1)])
def test_ops_refuse_counters_out_of_range(field, value):
    with pytest.raises(NybbleError, match=field):
        torch.ops.nybble.quantize(
            torch.ones(2, 16), "nvfp4", rounding="stochastic", key=nybble.key(0).tensor(), **{field: value}
        )


def test_ops_refuse_keys_of_the_wrong_kind():
    for key in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(NybbleError, match="int64 tensor"):
            torch.ops.nybble.quantize(torch.ones(2, 16), "nvfp4", rounding="stochastic", key=key)
