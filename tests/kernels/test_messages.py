"""Rows as bytes: what is packed comes back as the quantiser made it, by rows and in sums of rows."""

import pytest
import torch

from nybble import formats
from nybble.formats import ops
from nybble.kernels import messages


@pytest.mark.parametrize("columns", [64, 48, 33])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4", "bf16", "fp32"])
def test_a_message_holds_the_codes_and_values_of_its_rows(name, columns):
    x = torch.randn(5, columns) * torch.logspace(-3, 3, 5)[:, None]
    message = messages.pack(x, name)
    assert message.shape == (5, messages.row_bytes(name, columns))
    assert message.dtype == torch.uint8
    fmt = formats.get(name)
    outer = "row" if fmt.two_level else "tensor"
    whole = ops.quantize(x, name, -1, "nearest", outer)
    if not messages.plain(name):
        for part, expected in zip(messages.unpack_codes(message, name, columns), whole, strict=True):
            assert torch.equal(part, expected)
    expected = ops.dequantize(*whole, name, -1, x.shape, torch.float32, outer)
    picked = torch.tensor([4, 0, 0])
    assert torch.equal(messages.take_rows(message, picked), message[picked])
    assert torch.equal(messages.unpack(message[picked], name, columns, torch.float32), expected[picked])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "bf16"])
def test_rows_are_added_in_order_and_absent_ones_add_nothing(name):
    x = torch.randn(4, 32).bfloat16()
    message = messages.pack(x, name)
    values = messages.unpack(message, name, 32, torch.float32)
    places = torch.tensor([[0, 3], [2, -1], [-1, -1]], dtype=torch.int32)
    expected = torch.stack([values[0] + values[3], values[2], torch.zeros(32)])
    assert torch.equal(messages.unpack(message, name, 32, torch.float32, places), expected)
    assert torch.equal(
        messages.unpack(message[:0], name, 32, torch.bfloat16, places[2:]), torch.zeros(1, 32).bfloat16()
    )


def test_an_absent_row_adds_nothing_even_beside_a_nan():
    message = messages.pack(torch.full((1, 32), float("nan")), "mxfp8")
    out = messages.unpack(message, "mxfp8", 32, torch.float32, torch.tensor([[-1]], dtype=torch.int32))
    assert torch.equal(out, torch.zeros(1, 32))


def test_stochastic_rows_draw_by_their_own_index():
    """A token's bytes do not depend on which rows are packed with it."""
    x, key = torch.randn(6, 64), torch.tensor([1, 2, 3, 0])
    whole = messages.pack(x, "mxfp8", "stochastic", key, 4, 17)
    part = messages.pack(x[4:], "mxfp8", "stochastic", key, 4, 17, torch.tensor([4, 5]))
    assert torch.equal(part, whole[4:])
    assert not torch.equal(messages.pack(x[4:], "mxfp8", "stochastic", key, 4, 17), part)


def test_sizes_of_rows():
    assert messages.row_bytes("mxfp8", 4608) == 4608 + 4608 // 32
    assert messages.row_bytes("bf16", 4608) == 2 * 4608
    assert messages.row_bytes("mxfp8", 4608) <= 0.52 * messages.row_bytes("bf16", 4608)
    assert messages.row_bytes("nvfp4", 4608) == 2304 + 288 + 8
