"""Passes over the rows of routed experts: in plain torch, what a GPU's kernels do in one read each.

Legend: T tokens, k experts a token, E experts, R = T * k rows sorted by expert. `order` int32 [R] is the
pair (token * k + choice) of each row, `place` int32 [R] the row of each pair, `ends` int32 [E] where each
expert's rows end; rows at or beyond ends[-1] belong to no expert, hold anything, and count as zeros.

FP32 inside, BF16 in and out, and the quantisers of `formats`. The kernels of `kernels/cuda` have the same
bits but for tanh, exp and sums over features, which may differ in the last places of FP32, and for rows of no
expert. The ops are in `fused.py`.
"""

import torch
from torch import Tensor

from nybble.formats import ops, outer, table


def row_facts(order: Tensor, k: int, rows: Tensor | None, pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Token of each row, row of each pair, what each row counts as in draws: int32, int32, int64 [R].

    Args:
        rows: int64 [T], what each token counts as; its own index when None.
        pairs: else the third result is empty.
    """
    pair = order.long()
    place = torch.empty_like(order)
    place[pair] = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    counted = pair if rows is None else rows[pair // k] * k + pair % k
    return order // k, place, counted.clone() if pairs else pair.new_empty(0)


def row_factors(
    order: Tensor,
    ends: Tensor,
    k: int,
    amax: Tensor | None,
    format: str,
    per: str,
    w_amax: Tensor | None,
    w_format: str,
    weights: Tensor | None,
) -> Tensor:
    """FP32 [R]: weights[pair] * (S_dec of the row * S_dec of its expert's matrix), of those that are given.

    Args:
        amax: outer amax of the first operand, of `format`; `per` is "token", "row" or "one".
        w_amax: of the second, [E] or one.
        weights: routing weights, FP32 [R] by pair.
    """
    pair = order.long()
    factor = torch.ones(order.shape[0], device=order.device)
    if amax is not None:
        s = outer.decode_scale(table.get(format), amax)
        factor = {
            "token": lambda: s[pair // k],
            "row": lambda: s.clone(),
            "one": lambda: s.expand(len(pair)),
        }[per]()
    if w_amax is not None:
        s = outer.decode_scale(table.get(w_format), w_amax).reshape(-1)
        rows = torch.arange(len(pair), device=order.device, dtype=ends.dtype)
        expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        factor = factor * (s[expert] if len(s) > 1 else s)
    return weights[pair] * factor if weights is not None else factor.clone()


def outer_scales(amax: Tensor, format: str) -> Tensor:
    """S_dec of outer amaxes of `format`, FP32, of their shape."""
    return outer.decode_scale(table.get(format), amax)


def gather_rows(x: Tensor, index: Tensor, factor: Tensor | None) -> Tensor:
    """x [T, C] at int32 `index` [R], each row times `factor` (FP32 [R]) in FP32, rounded to x's dtype."""
    rows = x.index_select(0, index)
    return rows if factor is None else (rows.float() * factor[:, None]).to(x.dtype)


def combine_rows(x: Tensor, factor: Tensor | None, place: Tensor, ends: Tensor, k: int) -> Tensor:
    """[T, C]: the sum of each token's k rows times their factors, in FP32, in the order of the choices."""
    x = zero_behind(x, ends)
    per_choice = place.view(-1, k)
    total = torch.zeros(per_choice.shape[0], x.shape[1], device=x.device)
    for choice in range(k):
        rows = per_choice[:, choice]
        part = x.index_select(0, rows).float()
        total = total + (part if factor is None else part * factor[rows.long(), None])
    return total.to(x.dtype)


def quantize_to_rows(
    x: Tensor,
    format: str,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    place: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales and amax of x [T, H] along the features, and values (BF16 [R, H]) at each token's rows.

    The outer scale is one a token; values are without it.
    """
    q = ops.quantize(x, format, -1, rounding, "row", key, layer, operand, rows)
    values = ops.dequantize(*q, format, -1, x.shape, torch.bfloat16, "row", False)
    out = values.new_empty(place.shape[0], x.shape[1])
    out[place.long()] = values.repeat_interleave(place.shape[0] // max(x.shape[0], 1), 0)
    return *q, out


def decode_to_rows(codes: Tensor, scales: Tensor, amax: Tensor, format: str, index: Tensor) -> Tensor:
    """BF16 values, without their outer scale, of codes of tokens at int32 `index` [R]."""
    width = codes.shape[1] * (2 if table.get(format).packed else 1)
    shape = [codes.shape[0], width]
    values = ops.dequantize(codes, scales, amax, format, -1, shape, torch.bfloat16, "row", False)
    return values.index_select(0, index)


def zero_behind(x: Tensor, ends: Tensor) -> Tensor:
    """x [R, C] with the rows of no expert set to zero."""
    return torch.where((torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None], x, 0)
