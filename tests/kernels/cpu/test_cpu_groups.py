"""Token groups and row names: blocks restart at each group and draws follow the token."""

import pytest
import torch
from cpu_cases import KEY, OPS, check, granularities, hard

from nybble.formats import table
from nybble.kernels.cpu import layout

GROUPS = [[0, 1, 8, 41, 41, 105], [105], [0], [64, 96], [3, 3, 3], []]
FORMATS = [f.name for f in table.FORMATS.values() if not f.square]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", FORMATS)
def test_groups(format: str, axis: int) -> None:
    fmt = table.get(format)
    if axis == -2 and fmt.block_cols is None and not fmt.passthrough:
        pytest.skip("one scale a row has no grouped layout along axis -2")
    x = hard(105, 72)
    found: list[str] = []
    for ends in GROUPS:
        offs = torch.tensor(ends, dtype=torch.int32)
        for outer in granularities(format, 2):
            found += check(x, format, axis=axis, outer=outer, offs=offs)
            if not fmt.passthrough:
                rows = torch.randperm(105, generator=torch.Generator().manual_seed(3))
                how = {"rounding": "stochastic", "key": KEY, "operand": 4, "rows": rows}
                found += check(x, format, axis=axis, outer=outer, offs=offs, **how)
    assert not found


def test_row_names_beyond_32_bits() -> None:
    """Element indices reach into the upper counter word, and a row's draws do not depend on where it lies."""
    x = hard(12, 100, bad=False)
    rows = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**35 + 5, 2**38, 3, 2**33, 9, 8, 7])
    how = {"rounding": "stochastic", "key": KEY, "layer": 2**24 - 1, "operand": 255}
    assert not [*check(x, "mxfp8", rows=rows, **how), *check(x, "nvfp4", outer="row", rows=rows, **how)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    straight, _ = OPS.fake_quantize(x, "mxfp8", torch.float32, rows=rows, **how)
    shuffled, _ = OPS.fake_quantize(x[order], "mxfp8", torch.float32, rows=rows[order], **how)
    assert torch.equal(straight[order], shuffled)


@pytest.mark.parametrize("ends", [[200, 300], [50, 20, 105], [-5, 40]])
@pytest.mark.parametrize("axis", [-1, -2])
def test_bad_group_ends_stay_in_memory(ends: list[int], axis: int) -> None:
    """Ends beyond the tensor or out of order give some result; nothing outside the tensors is touched."""
    offs = torch.tensor(ends, dtype=torch.int32)
    starts, stops = layout.group_bounds(offs, 105)
    assert (starts >= 0).all()
    assert (stops <= 105).all()
    assert (starts <= stops).all()
    codes, scales, _ = OPS.quantize(hard(105, 72), "mxfp8", axis, offs=offs)
    assert codes.dtype == scales.dtype == torch.uint8
