"""Inputs that are hard on a quantiser, and comparison with the reference bit for bit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import nybble.kernels  # noqa: F401  (registers what is tested)
from nybble.formats import reference, table

OPS = torch.ops.nybble
KEY = torch.tensor([0x1234_5678_9ABC_DEF0, 7, 3, 8 * 1234567])
SPECIAL = torch.tensor(
    [
        0.0,
        -0.0,
        torch.nan,
        torch.inf,
        -torch.inf,
        1e-45,
        -1e-40,
        2.0**-126,
        3.4e38,
        -3.4e38,
        0.25,
        5.0,
        448.0,
        464.0,
    ]
)


def hard(*shape: int, seed: int = 0, bad: bool = True) -> Tensor:
    """Normal values at scales 2^-24 to 2^24, a row of zeros, a tiny one, and with `bad` NaN and extremes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 25, (*shape[:-1], 1), generator=generator)
    x = torch.randn(*shape, generator=generator) * torch.exp2(exponents.float())
    if len(shape) > 1 and shape[-2] > 4:
        x[..., 2, :] = 0
        x[..., 3, :] *= 1e-37
    if bad and x.numel() > 40:
        where = torch.randperm(x.numel(), generator=generator)[: min(2 * len(SPECIAL), x.numel() // 10)]
        x.view(-1)[where] = SPECIAL[torch.arange(len(where)) % len(SPECIAL)]
    return x


def difference(ours: Any, theirs: Any) -> str | None:
    """How two results differ in shape, type or any bit but a NaN's payload; None if they do not."""
    if isinstance(ours, Tensor):
        ours, theirs = (ours,), (theirs,)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
        if not a.is_contiguous():
            return f"output {i}: strides {a.stride()}"
        if a.dtype.is_floating_point:
            nan = torch.isnan(b)
            if not torch.equal(torch.isnan(a), nan):
                return f"output {i}: {int((torch.isnan(a) != nan).sum())} NaNs differ"
            a, b = (
                a.masked_fill(nan, 0).float().view(torch.int32),
                b.masked_fill(nan, 0).float().view(torch.int32),
            )
        if not torch.equal(a, b):
            return f"output {i}: {int((a != b).sum())} of {a.numel()} differ"
    return None


def granularities(format: str, dims: int) -> list[str]:
    """The outer scales that a format takes for a tensor of so many dimensions."""
    fmt = table.get(format)
    if not fmt.two_level:
        return ["tensor"]
    outers = ["tensor"] if fmt.square else ["tensor", "row"]
    return [*outers, "matrix"] if dims <= 3 else outers


def check(x: Tensor, format: str, dtype: torch.dtype = torch.float32, **how: Any) -> Iterator[str]:
    """What differs from the reference in quantising, faking and decoding x; nothing if all is well."""
    axis, outer, offs = how.get("axis", -1), how.get("outer", "tensor"), how.get("offs")
    expected = reference.quantize(x, format, **how)
    decode = (*expected, format, axis, x.shape, dtype, outer)
    full, inner = (reference.dequantize(*decode, apply_outer, offs) for apply_outer in (True, False))
    pairs: dict[str, tuple[Any, Any]] = {
        "quantize": (OPS.quantize(x, format, **how), expected),
        "fake_quantize": (OPS.fake_quantize(x, format, dtype, **how), (inner, expected[2])),
        "dequantize": (OPS.dequantize(*decode, True, offs), full),
        "dequantize without outer": (OPS.dequantize(*decode, False, offs), inner),
    }
    for name, (ours, theirs) in pairs.items():
        found = difference(ours, theirs)
        if found:
            yield f"{name} {tuple(x.shape)} {x.dtype} {format} {how}: {found}"
