"""Every format, axis, rounding and outer scale gives the reference's bits, whatever shape and values are."""

import pytest
import torch
from cpu_cases import KEY, check, granularities, hard

from nybble.formats import table

SHAPES = [(19, 100), (1, 16), (33, 1), (5,), (3, 50, 37), (2, 2, 17, 40)]
EMPTY = [(0,), (0, 8), (8, 0), (0, 4, 8), (2, 0, 8)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", table.names())
def test_all_shapes(format: str, axis: int, rounding: str) -> None:
    if rounding == "stochastic" and table.get(format).passthrough:
        pytest.skip("a cast draws nothing")
    how = {"rounding": rounding, "axis": axis}
    if rounding == "stochastic":
        how |= {"key": KEY, "layer": 70000, "operand": 5}
    found: list[str] = []
    for i, shape in enumerate(SHAPES + EMPTY):
        if -axis > len(shape):
            continue
        outers = granularities(format, len(shape))
        for outer in outers if i == 0 else [outers[i % len(outers)]]:
            found += check(hard(*shape), format, outer=outer, **how)
    if "128" in format:
        found += check(hard(130, 260), format, **how)
    assert not found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-4over6", "mxfp8", "fp8-128x128", "fp8-row"])
def test_sixteen_bit_tensors(format: str, dtype: torch.dtype) -> None:
    """BF16 is read as it is; an unaligned slice of it too."""
    found: list[str] = []
    for x in (hard(2, 21, 75).to(dtype), hard(20, 40).to(dtype)[1:, 1:], hard(99).to(dtype)[1:]):
        for outer in granularities(format, x.dim()):
            for axis in (-1, -2)[: x.dim()]:
                found += check(x, format, dtype, axis=axis, outer=outer)
                found += check(x, format, dtype, axis=axis, outer=outer, rounding="stochastic", key=KEY)
    assert not found


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "nvfp4-16x16"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_any_strides(format: str, axis: int) -> None:
    x = hard(48, 96)
    views = [
        x.t(),
        x[::2, ::3],
        x[:, :1].expand(48, 40),
        x[:1].expand(7, 96),
        torch.tensor(1.5).expand(8, 24),
    ]
    assert not [line for view in views for line in check(view, format, axis=axis)]
    assert not list(check(x.requires_grad_(), format, axis=axis))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4-floor", "mxfp8", "mxfp8-floor"])
def test_every_bfloat16_value(format: str) -> None:
    """Each of the 65536 bit patterns once at the top of its block and once among larger values."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    alone = torch.zeros(65536, 16)
    alone[:, 3] = bits
    crowd = bits[torch.randperm(65536, generator=torch.Generator().manual_seed(1))].view(256, 256)
    assert not [*check(alone, format), *check(crowd, format), *check(crowd, format, axis=-2)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("format", "largest"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
def test_around_every_tie(format: str, largest: float, rounding: str) -> None:
    """Midpoints and grid points of the element, one unit in the last place either way, under scale 1."""
    steps = torch.arange(0, 2**13) * (largest / 2**13)
    ulp = torch.stack(
        [steps, torch.nextafter(steps, torch.tensor(1e9)), torch.nextafter(steps, torch.tensor(0.0))]
    )
    x = torch.cat([ulp, -ulp]).flatten()[: 31 * 1585].view(-1, 31)
    x = torch.cat([torch.full((x.shape[0], 1), largest), x], dim=1)
    key = KEY if rounding == "stochastic" else None
    assert not list(check(x, format, rounding=rounding, key=key))


def test_fp32_ties_of_block_scales() -> None:
    """Block amaxes at and beside the midpoints of E4M3 scales, and beside powers of two times 448."""
    scale = torch.arange(1, 449, dtype=torch.float32).repeat_interleave(3) + torch.tensor(
        [-0.5, 0.0, 0.5]
    ).repeat(448)
    amax = torch.cat(
        [
            scale * 6,
            torch.nextafter(scale * 6, torch.tensor(0.0)),
            torch.exp2(torch.arange(-126, 127.0)) * 0.875,
        ]
    )
    x = torch.zeros(amax.numel() // 4 * 4, 16)
    x[:, 5] = amax[: x.shape[0]]
    x = x.view(4, -1)
    x[:, 0] = 2688.0
    for format in ("nvfp4", "nvfp4-4over6", "mxfp8", "mxfp4"):
        assert not [*check(x, format, outer="tensor"), *check(x.t(), format, outer="row", axis=-2)]
