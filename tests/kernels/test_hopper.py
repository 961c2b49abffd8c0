"""Which kernel multiplies FP8 codes of experts, and what a compiler sees of the products."""

import importlib.metadata

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nybble.errors import NybbleError
from nybble.kernels import hopper
from nybble.kernels.hopper import FP8, RowScaled


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.6.0", None),
        ("3.9.1+git5", None),
        ("3.61.0", "3.61.0 was not tried"),
        ("3.5.1", "3.5.1 was not tried"),
        (None, "triton is not installed"),
    ],
)
def test_torch_multiplies_where_triton_is_another(version, reason, monkeypatch):
    def installed(_name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    told = hopper.own_reason.__wrapped__()
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiler_sees_shapes_and_dtypes(gathered, dtype):
    with FakeTensorMode():
        codes, scales = torch.empty(10, 32, dtype=FP8), torch.empty(10)
        index = torch.empty(40, dtype=torch.int32) if gathered else None
        a = RowScaled(codes, scales, index=index)
        w = RowScaled(torch.empty(3, 48, 32, dtype=FP8), torch.empty(3, 48))
        ends = torch.empty(3, dtype=torch.int32)
        out = hopper.product_of_rows(a, w, ends)
        assert (out.shape, out.dtype) == ((40 if gathered else 10, 48), torch.bfloat16)
        stored = RowScaled(torch.empty(48, 96, dtype=FP8), torch.empty(3, 48), ends)
        out = hopper.product_of_groups(stored, stored, dtype)
        assert (out.shape, out.dtype) == ((3, 48, 48), dtype)


def test_widths_that_the_tensor_cores_cannot_read_are_named():
    a = RowScaled(torch.empty(10, 24, dtype=FP8), torch.empty(10))
    w = RowScaled(torch.empty(3, 48, 24, dtype=FP8), torch.empty(3, 48))
    with pytest.raises(NybbleError, match="multiples of 16, and these are 48 and 24"):
        hopper.product_of_rows(a, w, torch.tensor([1, 2, 3]))
