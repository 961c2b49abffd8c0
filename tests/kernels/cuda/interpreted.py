"""Runs a group of calls through the Triton kernels under Triton's interpreter, and prints which differ.

A script, because TRITON_INTERPRET must be set before anything imports triton.
"""

import sys
from typing import Any

import expert_cases
import torch
from cuda_cases import (
    AT_A_WORD,
    KEY,
    Call,
    blocks_of_scales,
    eden_cases,
    hostile,
    requantized,
    same,
    stochastic,
    transform_cases,
)

from nybble import formats
from nybble.formats import hadamard, reference, table
from nybble.kernels import fused, messages, weight_codes
from nybble.kernels.cuda import (
    experts_front,
    front,
    launch_both,
    launch_hadamard,
    launch_messages,
    launch_swiglu,
    launch_whole_columns,
    swiglu_front,
)

ROWS = torch.tensor([5, 1000, 0, 77, 2, 3, 4])
OFFS = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
MANY_ROWS = torch.arange(100).flip(0) * 3
LONG_ROWS = torch.randperm(70, generator=torch.Generator().manual_seed(0))
CODE_OFFS = torch.tensor([32, 35], dtype=torch.int32)
LONG_OFFS = torch.tensor([0, 1, 8, 41, 41, 60], dtype=torch.int32)


def quantize(x: torch.Tensor, name: str, axis: int = -1, **named: object) -> Call:
    return Call(op="quantize", args=(x, name, axis), named=named)


def values(x: torch.Tensor, name: str, axis: int = -1, **named: object) -> Call:
    return Call(op="fake_quantize", args=(x, name, torch.bfloat16, axis), named=named)


def calls(group: str) -> list[Call]:
    x, f = hostile(7, 40), hostile(7, 40, torch.float32)
    if group == "nvfp4 rows":
        return [
            quantize(x, "nvfp4", outer="row"),
            quantize(f, "nvfp4", outer="tensor", **stochastic()),
            quantize(hostile(7, 33), "nvfp4", outer="row", **stochastic()),
            quantize(x, "nvfp4", outer="matrix", offs=OFFS, **stochastic(rows=ROWS)),
            values(x, "nvfp4", outer="tensor", **stochastic()),
            quantize(hostile(7, 40)[4:], "nvfp4-4over6", outer="row"),
            quantize(x, "nvfp4-pow2", outer="row", **stochastic(rows=ROWS)),
            values(x, "nvfp4-pow2", outer="row", offs=OFFS),
        ]
    if group == "every format":
        names = [name for name in table.names() if not table.get(name).passthrough]
        small = hostile(9, 24)
        each = [(name, axis) for name in names for axis in (-1, -2)]
        return [quantize(small, *one, **stochastic()) for one in each] + [values(small, *one) for one in each]
    if group == "other rows":
        return [
            quantize(x, "mxfp8", **stochastic()),
            values(f, "mxfp8-floor", **stochastic()),
            quantize(x, "mxfp4", offs=OFFS),
            quantize(hostile(7, 200), "fp8-1x128"),
            quantize(hostile(15, 33), "fp8-1x128"),
            quantize(hostile(9, 16), "mxfp8"),
            values(x.expand(2, 7, 40), "fp8-row"),
            quantize(hostile(40, 72), "nvfp4-16x16", **stochastic()),
            quantize(hostile(130, 140), "fp8-128x128"),
            values(hostile(20, 40), "fp8-128x128"),
            values(hostile(2, 16600), "fp8-row"),
            quantize(hostile(2, 4200), "nvfp4", outer="row", **stochastic()),
            quantize(hostile(7, 1032), "nvfp4", outer="row"),
            values(hostile(7, 600), "fp8-row", **stochastic(rows=ROWS)),
        ]
    if group == "eden":
        return eden_cases(7, 140, OFFS)[:6] + eden_cases(70, 24, LONG_OFFS)[6:]
    if group == "columns":
        return [
            quantize(hostile(70, 24), "mxfp8", -2, offs=LONG_OFFS, **stochastic(rows=LONG_ROWS)),
            values(hostile(40, 20, torch.float32), "mxfp8", -2),
            quantize(hostile(40, 24), "mxfp4", -2, **stochastic()),
            quantize(hostile(33, 24), "nvfp4", -2, outer="row"),
            quantize(hostile(33, 24), "nvfp4-pow2", -2, outer="matrix"),
        ]
    assert group == "codes"
    shape = [40, 24]
    parts = reference.quantize(hostile(*shape), "nvfp4", -1, outer="row")
    return [
        requantized(hostile(70, 24), "nvfp4", "row", "mxfp8", stochastic(rows=LONG_ROWS), offs=LONG_OFFS),
        requantized(hostile(40, 24), "nvfp4", "row", "mxfp8", {}),
        requantized(blocks_of_scales(220, 8), "nvfp4", "row", "mxfp8", stochastic()),
        requantized(
            blocks_of_scales(100, 8),
            "nvfp4",
            "row",
            "mxfp8",
            stochastic(rows=MANY_ROWS),
            dtype=torch.bfloat16,
        ),
        requantized(
            blocks_of_scales(64, 72), "nvfp4", "row", "mxfp8", stochastic(key=AT_A_WORD), offs=CODE_OFFS
        ),
        requantized(hostile(64, 24).view(2, 32, 24), "nvfp4", "matrix", "mxfp8", {}, dtype=torch.bfloat16),
        requantized(hostile(66, 24).view(2, 33, 24), "nvfp4", "matrix", "fp8-row", stochastic()),
        Call(op="dequantize", args=(*parts, "nvfp4", -1, shape, torch.float32, "row", True)),
    ]


def both_differ() -> list[int]:
    x = hostile(40, 72)
    named = {"rounding": "stochastic", "key": KEY, "layer": 1}
    got = launch_both.launch(x, "mxfp8", torch.bfloat16, operand_rows=2, operand_columns=4, **named)
    want = (
        reference.fake_quantize(x, "mxfp8", torch.bfloat16, axis, operand=operand, **named)[0]
        for axis, operand in ((-1, 2), (-2, 4))
    )
    return [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not same(g, w)]


def codes_and_values_differ() -> list[int]:
    calls = [
        (hostile(18, 40, torch.float32).view(2, 9, 40), "nvfp4", "nearest", "matrix", None),
        (hostile(7, 33), "mxfp8", "nearest", "tensor", None),
    ]
    pairs = [(front.codes_and_values(*args), weight_codes.codes_and_values(*args)) for args in calls]
    return [i for i, (got, want) in enumerate(pairs) if not all(map(same, got, want))]


def messages_differ() -> dict[str, list[bool]]:
    """Messages packed by kernels against those that the CPU packs, and what comes out of them."""
    wrong = {}
    # Rows that fill tiles and rows that do not, so that tiles go on from row to row.
    for name, columns in (("mxfp8", 256), ("mxfp8", 4352), ("nvfp4", 128), ("nvfp4", 1152)):
        fmt, x = formats.get(name), hostile(5, columns)
        places = torch.tensor([[0, 3], [4, -1], [-1, -1], [2, 2]], dtype=torch.int32)
        got = launch_messages.pack(x, fmt, "stochastic", KEY, 3, 17, ROWS[:5])
        want = messages.pack(x, name, "stochastic", KEY, 3, 17, ROWS[:5])
        nearest = launch_messages.pack(x, fmt, "nearest", None, 0, 0, None)
        checks = [torch.equal(got, want), torch.equal(nearest, messages.pack(x, name))]
        picked = torch.tensor([4, 0, 0, 3])
        checks.append(torch.equal(launch_messages.take_rows(want, picked), want[picked]))
        for dtype in (torch.float32, torch.bfloat16):
            for where in (None, places):
                values = launch_messages.unpack(want, fmt, columns, dtype, where)
                checks.append(same(values, messages.unpack(want, name, columns, dtype, where)))
        if not all(checks):
            wrong[f"{name} {columns}"] = checks
    return wrong


def front_of(op: str) -> Any:
    """The module of CUDA's passes that has `op`."""
    return next(module for module in (experts_front, swiglu_front) if hasattr(module, op))


def expert_rows_differ() -> dict[int, Any]:
    out = {}
    launch_swiglu.RESIDENT_WARPS = 3  # so few programs that they go through several rows
    for i, (op, args) in enumerate(expert_cases.calls()):
        want = expert_cases.results(fused.SPECIFICATIONS[op], op, args)
        if bad := expert_cases.wrong(expert_cases.results(front_of(op), op, args), want, op):
            out[i] = (op, bad)
    return out


def transforms_differ() -> list[int]:
    cases = transform_cases(7, 40) + transform_cases(70, 24)
    pairs = ((launch_hadamard.transform(*case), hadamard.transform(*case)) for case in cases)
    return [i for i, (got, want) in enumerate(pairs) if not same(got, want)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    group = sys.argv[1]
    if group == "hadamard":
        print(transforms_differ())
        sys.exit(bool(transforms_differ()))
    if group == "messages":
        print(messages_differ())
        sys.exit(bool(messages_differ()))
    if group == "experts":
        different = expert_rows_differ()
        print(different)
        sys.exit(bool(different))
    launch_whole_columns.ENOUGH_COLUMNS = 1 if group == "codes" else 128  # "every format" takes the other way
    wrong = {i: bad for i, c in enumerate(calls(group)) if (bad := c.wrong(front, "cpu"))}
    if group == "codes":
        wrong.update({-1: bad} if (bad := both_differ()) else {})
        wrong.update({-2: bad} if (bad := codes_and_values_differ()) else {})
    print(wrong)
    sys.exit(bool(wrong))
