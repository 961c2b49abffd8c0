"""Byte-exact agreement with vectors that others computed."""

from pathlib import Path

import numpy as np
import pytest
import torch

import nybble
from nybble.formats import e2m1

FLT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max


@pytest.fixture(scope="module")
def golden():
    return np.load(Path(__file__).with_name("golden_blocks.npz"))


@pytest.mark.parametrize("outer", ["tensor", "row"])
@pytest.mark.parametrize(("suffix", "format"), [("", "nvfp4"), ("_4over6", "nvfp4-4over6")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_vectors(golden, outer, suffix, format, dtype):
    x = torch.from_numpy(golden["x"]).to(dtype)  # the vectors are bfloat16 values
    q = nybble.quantize(x, format, outer=outer)
    name = f"nvfp4_{outer}{suffix}"
    assert np.array_equal(e2m1.unpack(q.codes, 256).numpy(), golden[f"{name}_codes"])
    assert np.array_equal(q.scales.numpy(), golden[f"{name}_scales"])
    assert np.array_equal(q.encode_scale.numpy(), golden[f"{name}_senc"].reshape(q.amax.shape))
    assert torch.equal(q.tensor_scale, 1.0 / q.encode_scale)


@pytest.mark.parametrize(("rule", "format"), [("up", "mxfp8"), ("floor", "mxfp8-floor")])
def test_mxfp8_vectors(golden, rule, format):
    q = nybble.quantize(torch.from_numpy(golden["x"]), format)
    assert np.array_equal(q.codes.numpy(), golden[f"mxfp8_{rule}_codes"])
    assert np.array_equal(q.scales.numpy(), golden[f"mxfp8_{rule}_scales"])


def bits(pattern: int) -> float:
    return torch.tensor(pattern, dtype=torch.int32).view(torch.float32).item()


MXFP8 = [  # block, floor scale and data, up scale and data; the last of a list fills up the block of 32
    ("zeros", [0.0], 0, [0x00], 0, [0x00]),
    ("2^-126", [2.0**-126], 0, [0x40], 0, [0x40]),
    ("inf", [float("inf"), 1.0], 255, [0x7F, 0x7F], 255, [0x7F, 0x7F]),
    ("nan", [float("nan"), 1.0], 255, [0x7F, 0x7F], 255, [0x7F, 0x7F]),
    ("448", [448.0, -448.0], 127, [0x7E, 0xFE], 127, [0x7E, 0xFE]),
    ("480", [480.0, -480.0], 127, [0x7E, 0xFE], 128, [0x77, 0xF7]),
    ("FLT_MAX", [FLT_MAX], 246, [0x7E], 247, [0x78]),
    ("bf16 max", [BF16_MAX], 246, [0x7E], 247, [0x78]),
    ("2^-149", [2.0**-149, -(2.0**-149)], 0, [0x00, 0x80], 0, [0x00, 0x80]),
    ("2^-133", [2.0**-133, -(2.0**-133)], 0, [0x08, 0x88], 0, [0x08, 0x88]),
    ("tiny and 1", [2.0**-126, 1.0], 119, [0x00, 0x78], 119, [0x00, 0x78]),
    ("max and 1", [FLT_MAX, 1.0], 246, [0x7E, 0x00], 247, [0x78, 0x00]),
    ("3.5 + 1 ulp", [bits(0x40600001)], 120, [0x7E], 121, [0x76]),
    ("below 512", [bits(0x43FFFFFF)], 127, [0x7E], 128, [0x78]),
]


@pytest.mark.parametrize(
    ("block", "floor", "floor_data", "up", "up_data"), [m[1:] for m in MXFP8], ids=[m[0] for m in MXFP8]
)
def test_mxfp8_blocks_as_printed(block, floor, floor_data, up, up_data):
    x = torch.tensor(block + [block[-1]] * (32 - len(block)))
    for format, scale, data in (("mxfp8-floor", floor, floor_data), ("mxfp8", up, up_data)):
        q = nybble.quantize(x, format)
        assert q.scales.tolist() == [scale]
        assert q.codes.tolist() == data + [data[-1]] * (32 - len(data))


@pytest.mark.parametrize(("pattern", "format", "scale", "data"), [
    (0x40600001, "mxfp8", 120, 0x7E),
    (0x43FFFFFF, "mxfp8", 128, 0x78),
    (0x43FFFFFF, "mxfp8-floor", 128, 0x78),
])  # fmt: skip
def test_bfloat16_inputs_are_rounded_before_they_are_measured(pattern, format, scale, data):
    q = nybble.quantize(torch.full((32,), bits(pattern)).bfloat16(), format)
    assert (q.scales.item(), q.codes[0].item()) == (scale, data)


def test_mxfp4_scale_of_six_is_one():
    """A block that the element can hold as it is gets byte 127: not biased by the exponent of 6 twice."""
    for format in ("mxfp4", "mxfp4-floor"):
        q = nybble.quantize(torch.full((32,), 6.0), format)
        assert (q.scales.item(), q.codes[0].item()) == (127, 0x77)


def test_minus_fifty_four_gets_scale_nine_and_code_minus_six():
    x = torch.zeros(2, 16)
    x[0, 3], x[1, 0] = -54.0, 2688.0  # the latter makes the outer scale 1
    q = nybble.quantize(x, "nvfp4")
    assert q.encode_scale == 1
    assert q.scales[0].item() == 0x51
    assert e2m1.unpack(q.codes, 16)[0, 3] == 0xF
    assert q.dequantize()[0, 3] == -54


def test_the_largest_block_gets_the_largest_scale():
    """The outer scale divides by 6 * 448, not by 448 alone: all of E4M3 is used."""
    assert nybble.quantize(torch.full((16,), 1e-3), "nvfp4").scales.item() == 0x7E
    assert nybble.quantize(torch.full((16,), 1e-3), "nvfp4-4over6").scales.item() == 0x78  # 256


@pytest.mark.parametrize("amax", [0.0, 1e-38, FLT_MAX, 1e-45])
def test_extreme_outer_amaxes_stay_finite(amax):
    q = nybble.quantize(torch.full((32,), amax), "nvfp4")
    assert torch.isfinite(q.encode_scale)
    assert q.encode_scale > 0
    assert torch.isfinite(q.tensor_scale)
    assert torch.isfinite(q.dequantize()).all()
