"""The passes of `kernels/expert_swiglu.py` on CUDA tensors: brought to their kernel, or to the specification.

Which of the two, and when: see `experts_front.py`.
"""

from typing import Any

from torch import Tensor

from nybble.formats import table
from nybble.kernels import expert_swiglu as plain
from nybble.kernels.cuda import launch_experts as launch
from nybble.kernels.cuda import launch_swiglu as by_gates
from nybble.kernels.cuda.experts_front import BLOCK_TOKENS, gradient_both
from nybble.kernels.cuda.launch_columns import too_many
from nybble.kernels.cuda.launch_rows import Draw
from nybble.kernels.cuda.launch_swiglu import Gates
from nybble.kernels.cuda.row_source import Gated

COUNT = len(Gates._fields)


def swiglu_rows(
    gate_up: Tensor, factor: Tensor | None, ends: Tensor, gate_cap: float, up_cap: float
) -> Tensor:
    """See the specification."""
    fits = launch.bf16_rows(gate_up) and gate_up.shape[1] % 16 == 0 and ends.numel() > 0
    return (launch if fits else plain).swiglu_rows(gate_up, factor, ends, gate_cap, up_cap)


def swiglu_quantize(
    gate_up: Tensor,
    factor: Tensor | None,
    ends: Tensor,
    gate_cap: float,
    up_cap: float,
    format: str,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the specification."""
    if not (
        launch.bf16_rows(gate_up)
        and launch.holds_rows(format, gate_up.shape[1] // 2, rounding)
        and ends.numel()
    ):
        return plain.swiglu_quantize(
            gate_up, factor, ends, gate_cap, up_cap, format, rounding, key, layer, operand, rows
        )
    gated = Gated(gate_cap=gate_cap, up_cap=up_cap, factor=factor)
    draw = Draw.of(rounding, key, layer, operand, rows)
    return launch.quantize_tokens(gate_up, format, draw, gated, ends, None)


def swiglu_backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """See the specification."""
    *given, need_gate_up = arguments
    gates = Gates(*given)
    if not _fits(gates, 16):
        return plain.swiglu_backward(*arguments)
    return by_gates.swiglu_backward(gates, need_gate_up)


def swiglu_backward_fp8(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the specification."""
    gates, tiles = Gates(*arguments[:COUNT]), arguments[COUNT:]
    if not _fits(gates, 16) or too_many(1, gates.g.shape[0], BLOCK_TOKENS, gates.ends.shape[0]) is not None:
        return plain.swiglu_backward_fp8(*arguments)
    return by_gates.swiglu_backward_fp8(gates, *tiles)


def swiglu_backward_both(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """See the specification."""
    gates, (to_format, *tiles) = Gates(*arguments[:COUNT]), arguments[COUNT:]
    fmt, ends = table.get(to_format), gates.ends
    fits = _fits(gates, BLOCK_TOKENS) and fmt.scale == "e8m0" and not fmt.packed
    if not fits or too_many(1, gates.g.shape[0], BLOCK_TOKENS, ends.shape[0]) is not None:
        d, dots = swiglu_backward(*gates, True)
        return *gradient_both(d, to_format, None, None, ends, *tiles), dots
    return by_gates.swiglu_backward_both(gates, to_format, *tiles)


def _fits(gates: Gates, step: int) -> bool:
    """Whether kernels read what is given, of a width that is a multiple of `step`."""
    width, h = gates.g.shape[1], gates.h
    fits = launch.bf16_rows(gates.gate_up, gates.g) and width % step == 0 and gates.ends.numel() > 0
    held = launch.holds_rows(gates.format, width) if gates.coded else not h or launch.bf16_rows(h[0])
    return fits and held
