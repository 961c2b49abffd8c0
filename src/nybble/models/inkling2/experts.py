"""Routed experts of Inkling 2: soft-capped SwiGLU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import swiglu
from nybble.models.experts import RoutedExperts


class SoftcappedSwiGLU(nn.Module):
    """gate, up -> cap(gate) * sigmoid(gate) * cap(up), cap(x) = c * tanh(x / c); FP32 inside, dtype kept."""

    def __init__(self, gate_cap: float, up_cap: float) -> None:
        super().__init__()
        self.gate_cap, self.up_cap = gate_cap, up_cap

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        dtype, gate, up = gate.dtype, gate.float(), up.float()
        if by_hand_in_any_mode(gate):
            return _SoftcappedSwiGLU.apply(gate, up, (self.gate_cap, self.up_cap)).to(dtype)
        a = self.gate_cap * torch.tanh(gate / self.gate_cap)
        b = self.up_cap * torch.tanh(up / self.up_cap)
        return (a * torch.sigmoid(gate) * b).to(dtype)

    def rows(self, gate_up: Tensor) -> Tensor:
        """The same of gate and up side by side, FP32 [R, 2I] on a CPU -> [R, I]; without gradient."""
        return swiglu.forward(gate_up, (self.gate_cap, self.up_cap))

    def rows_backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        """Gradient at gate_up [R, 2I] for dy [R, I]."""
        return swiglu.backward(gate_up, dy, None, (self.gate_cap, self.up_cap))[0]


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


class _Caps(NamedTuple):
    """The activation for CPUs."""

    gate: float
    up: float

    def forward(self, h: Tensor) -> Tensor:
        return swiglu.forward(h, self)

    def backward(self, h: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return swiglu.backward(h, dy, w, self)


class Experts(RoutedExperts):
    """E experts as stacked matrices; gate and up are one."""

    first_name = "gate_up_proj"
    act_fn: SoftcappedSwiGLU

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__()
        self.num_experts = config.n_routed_experts
        self.hidden_dim, self.intermediate_dim = config.hidden_size, config.moe_intermediate_size
        E, H, width = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, width))
        self.act_fn = SoftcappedSwiGLU(config.mlp_gate_softcap, config.mlp_up_softcap)

    def activate(self, h: Tensor) -> Tensor:
        return self.act_fn(*h.chunk(2, dim=-1))

    def by_pass(self) -> _Caps:
        return _Caps(self.act_fn.gate_cap, self.act_fn.up_cap)
