"""Routed experts: soft-capped SwiGLU, tokens sorted by expert, a GEMM an expert or a grouped GEMM.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width; rows are the T * k routed copies of
tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.models.cpu import swiglu
from nybble.models.norms import by_hand


def sort_by_expert(experts: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of `experts` [T, k] by expert, stably.

    Returns:
        order [T * k]: row (token * k + choice) at each sorted place; place [T * k]: its inverse; ends [E]:
        int32, where each expert's rows end.
    """
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(flat[order], torch.arange(E, device=flat.device), right=True)
    return order, place, ends.to(torch.int32)


class SoftcappedSwiGLU(nn.Module):
    """gate, up -> cap(gate) * sigmoid(gate) * cap(up), cap(x) = c * tanh(x / c); FP32 inside, dtype kept."""

    def __init__(self, gate_cap: float, up_cap: float) -> None:
        super().__init__()
        self.gate_cap, self.up_cap = gate_cap, up_cap

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        dtype, gate, up = gate.dtype, gate.float(), up.float()
        if by_hand(gate):
            return _SoftcappedSwiGLU.apply(gate, up, (self.gate_cap, self.up_cap)).to(dtype)
        a = self.gate_cap * torch.tanh(gate / self.gate_cap)
        b = self.up_cap * torch.tanh(up / self.up_cap)
        return (a * torch.sigmoid(gate) * b).to(dtype)


class _SoftcappedSwiGLU(torch.autograd.Function):
    """Keeps only gate and up, and computes the rest again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, caps: tuple[float, float]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.caps = caps
        return swiglu.forward(swiglu.joined(gate, up), caps).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        d, _, _ = swiglu.backward(swiglu.joined(gate, up), dy.reshape(-1, width), None, ctx.caps)
        return d[:, :width].view(gate.shape), d[:, width:].view(gate.shape), None


class _ExpertsByHand(torch.autograd.Function):
    """A whole expert layer on a CPU; keeps the input and the gate and up products, not what follows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        order: Tensor,
        place: Tensor,
        ends: Tensor,
        caps: tuple[float, float],
    ) -> Tensor:
        T, k = weights.shape
        _, H, width = down.shape
        rows = x.index_select(0, order // k)
        h = x.new_empty(len(order), 2 * width)
        y = x.new_empty(len(order), H)
        spans = _spans(ends)
        for e, part in spans:
            torch.mm(rows[part], gate_up[e].T, out=h[part])
        act = swiglu.forward(h, caps)
        for e, part in spans:
            torch.mm(act[part], down[e].T, out=y[part])
        ctx.save_for_backward(x, weights, gate_up, down, order, place, ends, h)
        ctx.caps = caps
        y = y.index_select(0, place).view(T, k, H)
        out = y[:, 0] * weights[:, :1]
        for choice in range(1, k):
            out.addcmul_(y[:, choice], weights[:, choice : choice + 1])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, order, place, ends, h = ctx.saved_tensors
        T, k = weights.shape
        width = down.shape[2]
        token = order // k
        rows, dy = x.index_select(0, token), dout.index_select(0, token)
        w = weights.reshape(-1)[order]
        dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
        dact = h.new_empty(len(order), width)
        spans = _spans(ends)
        for e, part in spans:
            torch.mm(dy[part], down[e], out=dact[part])  # of the output before its routing weight
        dh, act, dw = swiglu.backward(h, dact, w, ctx.caps)
        drows = torch.empty_like(rows)
        for e, part in spans:
            torch.mm(dy[part].T, act[part], out=ddown[e])
            torch.mm(dh[part].T, rows[part], out=dgate_up[e])
            torch.mm(dh[part], gate_up[e], out=drows[part])
        for e in {*range(len(ends))} - {e for e, _ in spans}:
            dgate_up[e], ddown[e] = 0.0, 0.0
        dx = drows.index_select(0, place).view(T, k, x.shape[1]).sum(1)
        return dx, dw[place].view(T, k), dgate_up, ddown, None, None, None, None


def _spans(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    stops = ends.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False)) if b > a]


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


class Experts(nn.Module):
    """E experts as stacked matrices.

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H] in the input's dtype;
    the k outputs of a token are added in FP32.
    """

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__()
        self.num_experts = config.n_routed_experts
        self.hidden_dim, self.intermediate_dim = config.hidden_size, config.moe_intermediate_size
        E, H, width = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, width))
        self.act_fn = SoftcappedSwiGLU(config.mlp_gate_softcap, config.mlp_up_softcap)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, dtype = hidden_states, hidden_states.dtype
        T, k = top_k_index.shape
        order, place, ends = sort_by_expert(top_k_index, self.num_experts)
        gate_up, down = self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        if by_hand(x):
            caps = (self.act_fn.gate_cap, self.act_fn.up_cap)
            return _ExpertsByHand.apply(x, top_k_weights, gate_up, down, order, place, ends, caps)
        rows = _GatherRows.apply(x, order // k, place)
        h = grouped_linear(rows, gate_up, ends)
        y = grouped_linear(self.act_fn(*h.chunk(2, dim=-1)), down, ends)
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
