"""Launches of `swiglu_gradients.py` and of what goes on from there in one pass, for `kernels/fused.py`."""

from typing import Any

import torch
from torch import Tensor

from nybble.formats import table
from nybble.kernels.cuda import front, launch_columns, swiglu_gradients_both, swiglu_gradients_fp8
from nybble.kernels.cuda import swiglu_gradients as kernel
from nybble.kernels.cuda.column_source import TILE, as_source
from nybble.kernels.cuda.jit import cdiv, multiprocessors, use_asm
from nybble.kernels.cuda.launch_experts import as_pairs
from nybble.kernels.cuda.launch_rows import SCALES, pow2
from nybble.kernels.cuda.launch_whole_columns import measure_columns

WHOLE_ROW = 512
"""Units of eight elements that a program holds of a row."""
RESIDENT_WARPS = 24
"""Of a multiprocessor that runs what goes through rows: no program waits for another one to end."""


def _inputs(
    gate_up: Tensor,
    factor: Tensor | None,
    g: Tensor,
    g_factor: Tensor | None,
    weights: Tensor,
    order: Tensor,
    h: list[Tensor],
) -> tuple[Tensor | None, ...]:
    """What the kernels read first, in their order: up to the scales of h."""
    held = as_pairs(h[0]) if h else None
    scales = h[1] if len(h) == 3 else None
    return as_pairs(gate_up), factor, as_pairs(g), g_factor, weights, order, held, scales


def _options(
    gate_up: Tensor,
    factor: Tensor | None,
    g_factor: Tensor | None,
    gate_cap: float,
    up_cap: float,
    h: list[Tensor],
) -> dict[str, Any]:
    """Constants that the kernels share."""
    return {
        "GATE_CAP": gate_cap,
        "UP_CAP": up_cap,
        "HAS_FACTOR": factor is not None,
        "HAS_G_FACTOR": g_factor is not None,
        "DOT": (1 + int(len(h) == 3)) if h else 0,
        "ASM": use_asm(gate_up.device),
        "enable_fp_fusion": False,
    }


def _outer(h: list[Tensor], format: str) -> tuple[Tensor | None, dict[str, Any]]:
    """Outer amaxes of h, and how the kernels read them."""
    if len(h) != 3:
        return None, {"OUTER_MAX": 1.0, "AMAX_ROWS": 0}
    return h[2], {"OUTER_MAX": table.get(format).outer_max or 1.0, "AMAX_ROWS": int(h[2].numel() > 1)}


def swiglu_backward(
    gate_up: Tensor,
    factor: Tensor | None,
    g: Tensor,
    g_factor: Tensor | None,
    weights: Tensor,
    order: Tensor,
    ends: Tensor,
    gate_cap: float,
    up_cap: float,
    h: list[Tensor],
    format: str,
    need_gate_up: bool,
) -> tuple[Tensor, Tensor]:
    """See `fused.swiglu_backward`."""
    R, width = g.shape
    d = gate_up.new_empty(R if need_gate_up else 0, 2 * width)
    dots = torch.empty(R, dtype=torch.float32, device=g.device) if h else torch.zeros(R, device=g.device)
    units = width // 8
    n = max(64, min(512, pow2(units)))
    amax, outer = _outer(h, format)
    kernel.swiglu_backward_rows[(R,)](
        *_inputs(gate_up, factor, g, g_factor, weights, order, h),
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
        **_options(gate_up, factor, g_factor, gate_cap, up_cap, h),
    )
    return d, dots


def swiglu_backward_fp8(
    gate_up: Tensor,
    factor: Tensor | None,
    g: Tensor,
    g_factor: Tensor | None,
    weights: Tensor,
    order: Tensor,
    ends: Tensor,
    gate_cap: float,
    up_cap: float,
    h: list[Tensor],
    format: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `fused.swiglu_backward_fp8`; rows of no expert hold anything."""
    (R, width), device = g.shape, g.device
    units = width // 8
    if units > WHOLE_ROW:
        d, dots = swiglu_backward(
            gate_up, factor, g, g_factor, weights, order, ends, gate_cap, up_cap, h, format, True
        )
        codes, scales, _ = front.quantize(d, "fp8-row", -1)
        source = as_source(d)
        tiles = launch_columns.block_table(ends, R // TILE + ends.shape[0], TILE, 1)
        amax = measure_columns(source, tiles, ends)
        return d, codes, scales.squeeze(-1), amax.view(torch.float32), dots
    d = torch.empty_like(gate_up)
    codes = torch.empty(R, 2 * width, dtype=torch.uint8, device=device)
    scales = torch.empty(R, dtype=torch.float32, device=device)
    dots = torch.empty(R, dtype=torch.float32, device=device) if h else torch.zeros(R, device=device)
    amax = torch.zeros(ends.shape[0], 2 * width, dtype=torch.int32, device=device)
    n = max(32, pow2(units))
    warps = n // 32
    span = cdiv(R, multiprocessors(device) * max(1, RESIDENT_WARPS // warps))
    h_amax, outer = _outer(h, format)
    swiglu_gradients_fp8.swiglu_backward_fp8[(cdiv(R, span),)](
        *_inputs(gate_up, factor, g, g_factor, weights, order, h),
        h_amax,
        as_pairs(d),
        codes.view(torch.int64),
        scales,
        amax,
        dots,
        ends,
        R,
        span,
        units,
        ends.shape[0],
        cdiv(width, 16),
        N=n,
        G=pow2(ends.shape[0]),
        num_warps=warps,
        **outer,
        **_options(gate_up, factor, g_factor, gate_cap, up_cap, h),
    )
    return d, codes, scales, amax.view(torch.float32), dots


def swiglu_backward_both(
    gate_up: Tensor,
    factor: Tensor | None,
    g: Tensor,
    g_factor: Tensor | None,
    weights: Tensor,
    order: Tensor,
    ends: Tensor,
    gate_cap: float,
    up_cap: float,
    h: list[Tensor],
    format: str,
    to_format: str,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.swiglu_backward_both`; rows of no expert hold anything."""
    (R, width), device = g.shape, g.device
    blocks = R // TILE + ends.shape[0]
    if tiles is None:
        tiles = launch_columns.block_table(ends, blocks, TILE)
    first, second = torch.empty_like(gate_up), torch.empty_like(gate_up)
    fmt, parts = table.get(to_format), width // 32
    dots = torch.empty(parts, R, dtype=torch.float32, device=device) if h else None
    warps = launch_columns.WARPS
    swiglu_gradients_both.swiglu_backward_both[(parts, cdiv(blocks, warps))](
        *_inputs(gate_up, factor, g, g_factor, weights, order, h),
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
        **_options(gate_up, factor, g_factor, gate_cap, up_cap, h),
    )
    if dots is None:
        return first, second, torch.zeros(R, device=device)
    total, n = torch.empty(R, dtype=torch.float32, device=device), 256
    amax, outer = _outer(h, format)
    swiglu_gradients_both.add_dots[(cdiv(R, n),)](
        dots, order, amax, total, ends, R, ends.shape[0], PARTS=parts, CODED=amax is not None, N=n, **outer
    )
    return first, second, total
