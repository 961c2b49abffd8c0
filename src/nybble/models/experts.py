"""Routed experts: tokens sorted by expert, a GEMM an expert or a grouped GEMM, an activation between two.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width, W width of the first product (2I
with a gate, else I); rows are the T * k routed copies of tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nybble.kernels import fused
from nybble.kernels.cpu import rows as passes
from nybble.kernels.direct import by_hand
from nybble.layers.experts_by_hand import ExpertsByHand, Pass


def sort_by_expert(experts: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of `experts` [T, k] by expert, stably.

    Returns:
        order [T * k]: row (token * k + choice) at each sorted place; place [T * k]: its inverse; ends [E]:
        int32, where each expert's rows end.
    """
    rows, ends = fused.sort_pairs(experts, E)
    order = rows.long()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, place, ends


def count_rows(experts: Tensor, E: int) -> Tensor:
    """How many rows of `experts` [T, k] each of E experts got: [E] int64, without waiting for a GPU."""
    return fused.count_pairs(experts, E)


class _GatherRows(torch.autograd.Function):
    """x[index], each row of x taken by k places, `place` [T * k]; the backward pass gathers and adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        k = place.shape[0] // max(ctx.rows, 1)
        return dy[place].view(ctx.rows, k, dy.shape[-1]).sum(1, dtype=torch.float32).to(dy.dtype), None, None


class RoutedExperts(nn.Module):
    """E experts as stacked matrices: `first_name` [E, W, H], then `down_proj` [E, H, I].

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H] in the input's dtype;
    the k outputs of a token are added in FP32.
    """

    first_name: str
    down_proj: nn.Parameter
    act_fn: nn.Module

    def activate(self, h: Tensor) -> Tensor:
        """h [R, W] -> [R, I], any device and dtype."""
        raise NotImplementedError

    def by_pass(self) -> Pass:
        """The same for CPUs."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, dtype = hidden_states, hidden_states.dtype
        T, k = top_k_index.shape
        first, down = getattr(self, self.first_name).to(dtype), self.down_proj.to(dtype)
        if by_hand(x):
            order, place, ends = passes.sort(top_k_index, first.shape[0])
            act = self.by_pass()
            return ExpertsByHand.apply(x, top_k_weights, first, down, order, place, ends, act, False, True)
        order, place, ends = sort_by_expert(top_k_index, first.shape[0])
        rows = _GatherRows.apply(x, order // k, place)
        y = grouped_linear(self.activate(grouped_linear(rows, first, ends)), down, ends)
        y = _GatherRows.apply(y, place, order).view(T, k, x.shape[1])
        return (y.float() * top_k_weights[..., None]).sum(1).to(dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, K] sorted by expert, weight [E, N, K], ends [E] int32 -> [rows, N]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if torch.compiler.is_compiling():
        # no loop over a data-dependent length: all experts, masked; for checks of the graph, not for speed
        owner = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
        every = torch.einsum("tk,enk->ten", x, weight)
        return every.gather(1, owner[:, None, None].expand(-1, 1, every.shape[2]))[:, 0]
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = [F.linear(part, weight[e]) for e, part in enumerate(x.split(sizes))]
    return torch.cat(parts)
