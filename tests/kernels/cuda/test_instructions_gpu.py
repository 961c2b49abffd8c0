"""With Hopper's instructions and without, in plain Triton, the kernels give the reference's bits on a GPU."""

import importlib

import pytest
import torch
from cuda_cases import ROWS_OFFS, Call, hostile, requantized, same, stochastic

from nybble.formats import ops, reference
from nybble.kernels import messages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAUNCHERS = ("jit", "launch_rows", "launch_columns", "launch_messages", "launch_decode", "launch_requantize")
OFFS = torch.tensor(ROWS_OFFS, dtype=torch.int32)


@pytest.fixture(params=[True, False], ids=["hopper", "plain"])
def instructions(request, monkeypatch):
    if not request.param:
        for name in LAUNCHERS:
            module = importlib.import_module(f"nybble.kernels.cuda.{name}")
            monkeypatch.setattr(module, "use_asm", lambda _: False)


def quantisers(x):
    """Calls that take every rounding, source and layout."""
    for rounding in ({}, stochastic()):
        for name, axis in (("nvfp4", -1), ("nvfp4", -2), ("mxfp8", -1), ("mxfp8", -2), ("mxfp4", -1)):
            yield Call(op="quantize", args=(x, name, axis), named=rounding)
            yield Call(op="fake_quantize", args=(x, name, torch.bfloat16, axis), named=rounding)
        yield requantized(x, "nvfp4", "row", "mxfp8", rounding, offs=OFFS)
        yield requantized(x, "nvfp4", "row", "mxfp8", rounding, dtype=torch.bfloat16)
    parts = reference.quantize(x, "nvfp4", -1, outer="row")
    args = (*parts, "nvfp4", -1, list(x.shape), torch.bfloat16, "row", True)
    yield Call(op="dequantize", args=args)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_quantisers(dtype):
    wrong = [call for call in quantisers(hostile(70, 264, dtype)) if call.wrong(ops, "cuda")]
    assert [(call.op, call.args[1:], call.named) for call in wrong] == []


@pytest.mark.usefixtures("instructions")
def test_messages_and_their_sums():
    message = messages.pack(hostile(50, 384), "nvfp4")
    places = torch.randint(-1, 50, (40, 2), dtype=torch.int32)
    got = messages.unpack(message.cuda(), "nvfp4", 384, torch.bfloat16, places.cuda())
    assert same(got.cpu(), messages.unpack(message, "nvfp4", 384, torch.bfloat16, places))
