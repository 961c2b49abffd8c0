"""SwiGLU and its gradients over the rows of routed experts: in plain torch, what a GPU's kernels do.

Legend, rounding and what kernels must equal: see `expert_rows.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats import ops
from nybble.kernels import expert_columns
from nybble.kernels.expert_rows import zero_behind


def swiglu_rows(
    gate_up: Tensor, factor: Tensor | None, ends: Tensor, gate_cap: float, up_cap: float
) -> Tensor:
    """h [R, I] of gate and up [R, 2I], which are multiplied by `factor` [R] and rounded to their dtype first.

    Caps of 0 are the plain SwiGLU.
    """
    gate, up = _scaled(gate_up, factor, ends).float().chunk(2, -1)
    return _swiglu(gate, up, gate_cap, up_cap).to(gate_up.dtype)


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
    """(codes, scales, amax, values) of what `swiglu_rows` gives, along the features.

    The outer scale is one a row; values are in BF16, without it.
    """
    h = swiglu_rows(gate_up, factor, ends, gate_cap, up_cap)
    q = ops.quantize(h, format, -1, rounding, "row", key, layer, operand, rows)
    return *q, ops.dequantize(*q, format, -1, h.shape, torch.bfloat16, "row", False)


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
    """(gradient at gate and up [R, 2I], gradient at the routing weights FP32 [R] by pair).

    Args:
        gate_up, factor: as for `swiglu_rows`.
        g: [R, I], gradient at h before the routing weight; times `g_factor` [R] in FP32.
        weights: FP32 [R] by pair.
        h: what the down product took: codes, scales and amax of `format` (outer scale one a row), or its
            values alone; without it the second result is zeros.
        need_gate_up: else the first result is empty.
    """
    dh = zero_behind(g, ends).float()
    dh = dh if g_factor is None else dh * g_factor[:, None]
    pair = order.long()
    dots = torch.zeros(order.shape[0], device=g.device)
    if h:
        full = h[0].float()
        if len(h) == 3:
            full = ops.dequantize(*h, format, -1, dh.shape, torch.float32, "row", True)
        dots[pair] = (dh * zero_behind(full, ends)).sum(-1)
    if not need_gate_up:
        return gate_up.new_empty(0, gate_up.shape[1]), dots
    gate, up = _scaled(gate_up, factor, ends).float().chunk(2, -1)
    dh = dh * weights[pair, None]
    s = torch.sigmoid(gate)
    if gate_cap > 0:
        tg, tu = torch.tanh(gate / gate_cap), torch.tanh(up / up_cap)
        left = tg * s
        slope = (s - left * tg) / gate_cap + (left - left * s)
        d = torch.cat([slope * tu * dh * (gate_cap * up_cap), (left - left * tu * tu) * dh * gate_cap], -1)
    else:
        y = gate * s
        d = torch.cat([(s + (y - y * s)) * up * dh, y * dh], -1)
    return d.to(gate_up.dtype), dots


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
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `swiglu_backward` gives, its gradient at gate and up in fp8-row along the features: (codes uint8
    [R, 2I], the same as `transpose_codes` puts them, scales FP32 [R], dots [R]).

    A row of zeros has scale 0, as `gradient_factors` wants it. `tiles` as for that of columns.
    """
    d, dots = swiglu_backward(
        gate_up, factor, g, g_factor, weights, order, ends, gate_cap, up_cap, h, format, True
    )
    codes, scales, _ = ops.quantize(d, "fp8-row", -1)
    columns = expert_columns.transpose_codes(codes, ends, None, tiles)
    return codes, columns, expert_columns.gradient_factors(codes, scales.squeeze(-1)), dots


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
    """What `swiglu_backward` gives, its gradient at gate and up as `gradient_both` gives it in `to_format`:
    (BF16 values [R, 2I] quantised along the features, and along each expert's rows, dots [R])."""
    d, dots = swiglu_backward(
        gate_up, factor, g, g_factor, weights, order, ends, gate_cap, up_cap, h, format, True
    )
    return *expert_columns.gradient_both(d, to_format, None, None, ends, tiles), dots


def _scaled(gate_up: Tensor, factor: Tensor | None, ends: Tensor) -> Tensor:
    x = zero_behind(gate_up, ends)
    return x if factor is None else (x.float() * factor[:, None]).to(gate_up.dtype)


def _swiglu(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    if gate_cap > 0:
        capped = gate_cap * torch.tanh(gate / gate_cap)
        return (capped * torch.sigmoid(gate)) * (up_cap * torch.tanh(up / up_cap))
    return F.silu(gate) * up
