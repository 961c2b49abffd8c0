"""Inputs that break quantisers, calls that cover the kernels, and equality of bits."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nybble.formats import philox, reference

AT_A_WORD = torch.tensor([0x123456789ABCDEF, 7, 3, (1 << 35) - 8 * 80])
"""A key for which the lower word of a Philox counter ends within a few rows."""
SHIFT = torch.tensor([8 * 1234567])  # a part of a larger tensor
KEY = torch.cat([philox.Key(seed=0x123456789ABCDEF, step=7, micro=3).tensor(), SHIFT])
ROWS_OFFS = (0, 1, 8, 41, 41, 60)


def hostile(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Values over 24 binades, with zeros of both signs, ties, subnormals, huge values, a NaN and an Inf."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=gen) * torch.exp2(
        torch.randint(-12, 12, (rows, cols), generator=gen).float()
    )
    x[0, : min(cols, 16)] = 0
    x[0, min(cols - 1, 3)] = -0.0
    if rows > 6:
        x[1, min(cols - 1, 5)] = float("nan")
        x[2, cols // 2] = float("-inf")
        x[3] *= 1e-38
        x[4] *= 1e34
        x[5] = 0
        ties = torch.arange(min(cols, 32)) / 4
        x[6, : len(ties)] = ties * -1
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, types and bits; any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = torch.isnan(a)
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(nan, torch.isnan(b)) and torch.equal(
        torch.where(nan, 0, a).view(as_int), torch.where(nan, 0, b).view(as_int)
    )


def moved(v: Any, device: str) -> Any:
    """Tensors to a device, the rest as it is."""
    return v.to(device) if isinstance(v, Tensor) else v


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op."""

    op: str
    args: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)

    def wrong(self, module: Any, device: str) -> list[int]:
        """Which results of `module`'s op on `device` differ from the reference on the CPU."""
        want = getattr(reference, self.op)(*self.args, **self.named)
        got = getattr(module, self.op)(
            *(moved(a, device) for a in self.args), **{k: moved(v, device) for k, v in self.named.items()}
        )
        want, got = (r if isinstance(r, tuple) else (r,) for r in (want, got))
        return [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not same(g.cpu(), w)]


def stochastic(**named: Any) -> dict[str, Any]:
    """Arguments of a stochastic call."""
    return {"rounding": "stochastic", "key": KEY, "layer": 5, "operand": 3, **named}


def blocks_of_scales(rows: int, cols: int) -> Tensor:
    """FP32 values whose blocks of 32 rows are each of another size, within what is re-rounded quickly, at its
    ends and beyond; rows of every other block are of many sizes."""
    gen = torch.Generator().manual_seed(3)
    block = torch.arange(rows) // 32
    sizes = torch.tensor([0.0, 0.0, 15, -112, -98, 100, -118])
    spread = torch.randint(-18, 18, (rows,), generator=gen) * (block % 2)
    return torch.randn(rows, cols, generator=gen) * torch.exp2(sizes[block % len(sizes)] + spread)[:, None]


def requantized(x: Tensor, format: str, outer: str, to: str, rounding: dict[str, Any], **named: Any) -> Call:
    """A call that re-rounds the codes of x along the tokens."""
    codes, scales, amax = reference.quantize(x, format, -1, outer=outer)
    op = "fake_requantize" if "dtype" in named else "requantize"
    args = (codes, scales, amax, format, -1, outer, list(x.shape), to, -2)
    return Call(op=op, args=args, named={**rounding, **named})


def eden_cases(rows: int, cols: int, offs: Tensor) -> list[Call]:
    """MS-EDEN of codes and of values: both axes, outer scales of each kind, groups, matrices, short runs."""
    x, f = hostile(rows, cols), hostile(rows, cols, torch.float32, seed=1)
    how = {"rounding": "eden", "key": KEY, "layer": 70000, "operand": 4}
    moved = {"rows": torch.arange(rows).flip(0) * 5, "offs": offs}
    calls = []
    for axis in (-1, -2):
        calls += [
            Call(op="quantize", args=(f, "nvfp4", axis), named={"outer": "row", **how}),
            Call(op="quantize", args=(x, "nvfp4", axis), named={"outer": "matrix", **how, **moved}),
            Call(
                op="quantize",
                args=(torch.stack([f, f * 3]), "nvfp4-pow2", axis),
                named={"outer": "matrix", **how},
            ),
            Call(op="fake_quantize", args=(f, "nvfp4", torch.bfloat16, axis), named=how),
            Call(
                op="fake_quantize",
                args=(f, "nvfp4", torch.float32, axis),
                named={"outer": "matrix", **how, **moved},
            ),
            Call(
                op="fake_quantize",
                args=(torch.stack([f, x]), "nvfp4", torch.bfloat16, axis),
                named={"outer": "row", **how},
            ),
        ]
    return calls


def transform_cases(rows: int, cols: int) -> list[tuple[Any, ...]]:
    """Arguments of the Hadamard transform: both axes, sizes and kinds of signs, groups, matrices, strides."""
    x, f = hostile(rows, cols), hostile(rows, cols, torch.float32)
    offs = torch.tensor([0, 1, rows // 3, rows // 3, rows - 2], dtype=torch.int32)
    return [
        (x, -1, 16),
        (f, -2, 16, KEY, 3, 68),
        (f, -1, 128, KEY, 3, 66),
        (x, -2, 64),
        (x, -2, 16, None, 0, 0, offs),
        (f, -2, 128, KEY, 1, 76, offs),
        (f.t(), -1, 32),
        (torch.stack([x, x * 2]), -2, 16),
        (x[0], -1, 16),
        (x[:0], -2, 16),
    ]
