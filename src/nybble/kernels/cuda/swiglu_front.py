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
from nybble.kernels.cuda.launch_rows import Draw, Gated


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


def swiglu_backward(gate_up: Tensor, factor: Tensor | None, g: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """See the specification."""
    ends, h = rest[3], rest[6]
    fits = launch.bf16_rows(gate_up, g) and g.shape[1] % 16 == 0 and ends.numel() > 0
    fits = fits and _takes_h(h, rest[7], g.shape[1])
    return (by_gates if fits else plain).swiglu_backward(gate_up, factor, g, *rest)


def swiglu_backward_fp8(
    gate_up: Tensor, factor: Tensor | None, g: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the specification."""
    ends, h, width = rest[3], rest[6], g.shape[1]
    fits = launch.bf16_rows(gate_up, g) and width % 16 == 0 and ends.numel() > 0
    fits = fits and _takes_h(h, rest[7], width)
    return (by_gates if fits else plain).swiglu_backward_fp8(gate_up, factor, g, *rest)


def swiglu_backward_both(
    gate_up: Tensor, factor: Tensor | None, g: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """See the specification."""
    ends, h, fmt, width = rest[3], rest[6], table.get(rest[8]), g.shape[1]
    fits = launch.bf16_rows(gate_up, g) and width % BLOCK_TOKENS == 0 and ends.numel() > 0
    fits = fits and _takes_h(h, rest[7], width) and fmt.scale == "e8m0" and not fmt.packed
    if not fits or too_many(1, g.shape[0], BLOCK_TOKENS, ends.shape[0]) is not None:
        d, dots = swiglu_backward(gate_up, factor, g, *rest[:8], True)
        return *gradient_both(d, rest[8], None, None, ends, *rest[9:]), dots
    return by_gates.swiglu_backward_both(gate_up, factor, g, *rest)


def _takes_h(h: list[Tensor], format: str, width: int) -> bool:
    """Whether kernels read what the down product took of h."""
    return (len(h) != 1 or launch.bf16_rows(h[0])) and (len(h) != 3 or launch.holds_rows(format, width))
