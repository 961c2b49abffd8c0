"""Re-rounding codes gives the bits of decoding them whole and quantising again."""

import pytest
import torch
from cpu_cases import KEY, OPS, difference, granularities, hard

from nybble.formats import reference, table

TARGETS = [
    ("mxfp8", -2, "tensor", "stochastic"),
    ("mxfp8", -1, "tensor", "nearest"),
    ("mxfp4", -2, "tensor", "nearest"),
    ("fp8-1x128", -1, "tensor", "stochastic"),
    ("fp8-128x128", -2, "tensor", "nearest"),
    ("fp8-row", -2, "tensor", "nearest"),
    ("nvfp4", -2, "row", "stochastic"),
    ("bf16", -1, "tensor", "nearest"),
]


def compare(shape: tuple[int, ...], format: str, axis: int, offs: torch.Tensor | None) -> list[str]:
    found = []
    for outer in granularities(format, len(shape)):
        source = reference.quantize(hard(*shape), format, axis, outer=outer, offs=offs)
        for to_format, to_axis, to_outer, rounding in TARGETS:
            to = table.get(to_format)
            if offs is not None and (to.square or (to.block_cols is None and to_axis == -2)):
                continue
            how = {"rounding": rounding, "to_outer": to_outer, "layer": 3, "operand": 5, "offs": offs}
            if rounding == "stochastic":
                how["key"] = KEY
                if len(shape) == 2:
                    how["rows"] = torch.arange(shape[0]).flip(0) * 5
            head = (*source, format, axis, outer, shape, to_format, to_axis)
            theirs = reference.requantize(*head, **how)
            fake = reference.fake_requantize(*head, torch.bfloat16, **how)
            for name, ours, wanted in (
                ("requantize", OPS.requantize(*head, **how), theirs),
                ("fake_requantize", OPS.fake_requantize(*head, torch.bfloat16, **how), fake),
            ):
                different = difference(ours, wanted)
                if different:
                    found.append(
                        f"{name} {shape} {format} {axis} {outer} to {to_format} {to_axis}: {different}"
                    )
    return found


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-16x16", "mxfp8", "mxfp4", "fp8-1x128", "fp8-row", "bf16"])
def test_requantize(format: str, axis: int) -> None:
    assert not [*compare((45, 70), format, axis, None), *compare((3, 33, 40), format, axis, None)]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_requantize_groups(format: str) -> None:
    offs = torch.tensor([0, 1, 8, 41, 41, 66], dtype=torch.int32)
    assert not compare((70, 50), format, -1, offs)


def test_every_code_and_scale_byte_decodes() -> None:
    """Codes and scales that no quantiser would write decode too, alone and on their way to another format."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    for format, shape in (("nvfp4", (256, 512)), ("mxfp4", (256, 512)), ("mxfp8", (256, 256))):
        fmt = table.get(format)
        assert fmt.block_cols is not None
        all_scales = scales.repeat(1, shape[1] // fmt.block_cols)
        amax = torch.tensor(5.0) if fmt.two_level else torch.empty(0)
        head = (codes, all_scales, amax, format, -1)
        ours, theirs = (f(*head, shape, torch.float32) for f in (OPS.dequantize, reference.dequantize))
        assert difference(ours, theirs) is None
        rest = ("tensor", shape, "mxfp8", -2, torch.float32)
        assert difference(OPS.fake_requantize(*head, *rest), reference.fake_requantize(*head, *rest)) is None
