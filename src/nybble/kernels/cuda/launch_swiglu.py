"""Launches of `swiglu_gradients.py` and of what goes on from there in one pass, for `kernels/fused.py`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nybble.formats import table
from nybble.kernels.cuda import front, launch_columns, swiglu_gradients_both, swiglu_gradients_fp8
from nybble.kernels.cuda import swiglu_gradients as kernel
from nybble.kernels.cuda.column_source import TILE
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_expert_columns import gradient_factors, token_tiles, transpose_codes
from nybble.kernels.cuda.launch_experts import as_pairs
from nybble.kernels.cuda.launch_rows import SCALES, pow2

WHOLE_ROW = 512
"""Units of eight elements that a program holds of a row."""


class Gates(NamedTuple):
    """What the gradient of a SwiGLU is found from, as `fused.swiglu_backward` takes it."""

    gate_up: Tensor
    factor: Tensor | None
    g: Tensor
    g_factor: Tensor | None
    weights: Tensor
    order: Tensor
    ends: Tensor
    gate_cap: float
    up_cap: float
    h: list[Tensor]
    format: str

    @property
    def coded(self) -> bool:
        """Whether h is in codes."""
        return len(self.h) == 3

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What the kernels read first, in their order: up to the scales of h."""
        held = as_pairs(self.h[0]) if self.h else None
        scales = self.h[1] if self.coded else None
        x, g = as_pairs(self.gate_up), as_pairs(self.g)
        return x, self.factor, g, self.g_factor, self.weights, self.order, held, scales

    @property
    def options(self) -> dict[str, Any]:
        """Constants that the kernels share."""
        return {
            "GATE_CAP": self.gate_cap,
            "UP_CAP": self.up_cap,
            "HAS_FACTOR": self.factor is not None,
            "HAS_G_FACTOR": self.g_factor is not None,
            "DOT": (1 + int(self.coded)) if self.h else 0,
            "ASM": use_asm(self.g.device),
            "enable_fp_fusion": False,
        }

    @property
    def outer(self) -> tuple[Tensor | None, dict[str, Any]]:
        """Outer amaxes of h, and how the kernels read them."""
        if not self.coded:
            return None, {"OUTER_MAX": 1.0, "AMAX_ROWS": 0}
        amax = self.h[2]
        return amax, {
            "OUTER_MAX": table.get(self.format).outer_max or 1.0,
            "AMAX_ROWS": int(amax.numel() > 1),
        }

    def new_dots(self) -> Tensor:
        """Room for the gradient at the routing weights, which is zeros without h."""
        make = torch.empty if self.h else torch.zeros
        return make(self.g.shape[0], dtype=torch.float32, device=self.g.device)


def swiglu_backward(gates: Gates, need_gate_up: bool) -> tuple[Tensor, Tensor]:
    """See `fused.swiglu_backward`."""
    ends, (R, width) = gates.ends, gates.g.shape
    d = gates.gate_up.new_empty(R if need_gate_up else 0, 2 * width)
    dots = gates.new_dots()
    units = width // 8
    n = max(64, min(512, pow2(units)))
    amax, outer = gates.outer
    kernel.swiglu_backward_rows[(R,)](
        *gates.inputs,
        amax,
        as_pairs(d),
        dots,
        ends,
        units,
        ends.shape[0],
        cdiv(width, 16),
        D=need_gate_up,
        LOOPS=cdiv(units, n),
        N=n,
        num_warps=min(8, n // 32),
        **outer,
        **gates.options,
    )
    return d, dots


def swiglu_backward_fp8(gates: Gates, tiles: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fused.swiglu_backward_fp8`; rows of no expert hold anything."""
    ends, (R, width), device = gates.ends, gates.g.shape, gates.g.device
    units, blocks = width // 8, R // TILE + ends.shape[0]
    if tiles is None:
        tiles, _ = token_tiles(ends, R)
    if units > WHOLE_ROW:
        d, dots = swiglu_backward(gates, True)
        codes, scales, _ = front.quantize(d, "fp8-row", -1)
        columns = transpose_codes(codes, ends, None, tiles)
        return codes, columns, gradient_factors(codes, scales.squeeze(-1), None, 1, None), dots
    columns = torch.empty(2 * width, blocks * TILE, dtype=torch.uint8, device=device)
    codes = torch.empty(R, 2 * width, dtype=torch.uint8, device=device)
    scales = torch.empty(R, dtype=torch.float32, device=device)
    dots = gates.new_dots()
    n = max(32, pow2(cdiv(units, 2)))
    h_amax, outer = gates.outer
    swiglu_gradients_fp8.swiglu_backward_fp8[(blocks,)](
        *gates.inputs,
        h_amax,
        codes.view(torch.int64),
        columns.view(torch.int64),
        scales,
        dots,
        *tiles[:2],
        ends,
        R,
        blocks,
        units,
        ends.shape[0],
        cdiv(width, 16),
        N=n,
        UNITS=cdiv(units, n),
        num_warps=n // 32,
        maxnreg=96,  # 20 warps a multiprocessor
        **outer,
        **gates.options,
    )
    return codes, columns, scales, dots


def swiglu_backward_both(
    gates: Gates, to_format: str, tiles: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.swiglu_backward_both`; rows of no expert hold anything."""
    ends, (R, width), device = gates.ends, gates.g.shape, gates.g.device
    blocks = R // TILE + ends.shape[0]
    if tiles is None:
        tiles = launch_columns.block_table(ends, blocks, TILE)
    first, second = torch.empty_like(gates.gate_up), torch.empty_like(gates.gate_up)
    fmt, parts = table.get(to_format), width // 32
    dots = torch.empty(parts, R, dtype=torch.float32, device=device) if gates.h else None
    warps = launch_columns.WARPS
    swiglu_gradients_both.swiglu_backward_both[(parts, cdiv(blocks, warps))](
        *gates.inputs,
        as_pairs(first),
        as_pairs(second),
        dots,
        *tiles[:2],
        R,
        width,
        blocks,
        cdiv(width, 16),
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        W=warps,
        num_warps=warps,
        maxnreg=128,  # four programs a multiprocessor
        **gates.options,
    )
    if dots is None:
        return first, second, gates.new_dots()
    total, n = gates.new_dots(), 256
    amax, outer = gates.outer
    swiglu_gradients_both.add_dots[(cdiv(R, n),)](
        dots,
        gates.order,
        amax,
        total,
        ends,
        R,
        ends.shape[0],
        PARTS=parts,
        CODED=gates.coded,
        N=n,
        enable_fp_fusion=True,
        **outer,
    )
    return first, second, total
