"""The transform and MS-EDEN by numba have the reference's bits, whatever shape, groups and values are."""

import pytest
import torch
from cpu_cases import KEY, OPS, check, difference, hard

from nybble.formats import hadamard

OFFS = torch.tensor([0, 1, 8, 41, 41, 66], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 128])
def test_hadamard(size: int, dtype: torch.dtype) -> None:
    found = []
    for shape in [(19, 100), (1, 16), (130, 70), (5,), (3, 50, 37), (2, 2, 33, 40), (0, 8)]:
        for axis in (-1, -2)[: len(shape)]:
            for key in (None, KEY):
                arguments = (hard(*shape).to(dtype), axis, size, key, 3, 66)
                found.append(difference(OPS.hadamard(*arguments), hadamard.transform(*arguments)))
    grouped = (hard(70, 50).to(dtype), -2, size, None, 0, 0, OFFS)
    found.append(difference(OPS.hadamard(*grouped), hadamard.transform(*grouped)))
    assert set(found) == {None}


def test_hadamard_of_a_strided_view() -> None:
    x = hard(96, 80).t()[::2]
    assert difference(OPS.hadamard(x, -2, 16), hadamard.transform(x, -2, 16)) is None


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-pow2"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_eden(format: str, axis: int) -> None:
    how = {"rounding": "eden", "axis": axis, "key": KEY, "layer": 70000, "operand": 4}
    found: list[str] = []
    for shape in [(19, 300), (1, 16), (130, 37), (5,), (3, 50, 37), (0, 8)]:
        if -axis <= len(shape):
            for outer in ("tensor", "row", "matrix"):
                found += check(hard(*shape), format, outer=outer, **how)
    found += check(hard(70, 50), format, outer="matrix", rows=torch.arange(70).flip(0) * 5, offs=OFFS, **how)
    assert not found
