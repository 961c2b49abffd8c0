"""Squared-ReLU feed-forward layers: dense, and routed over experts with a shared one beside them."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import NemotronHConfig

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.direct import by_hand
from nybble.models.experts import RoutedExperts, count_rows
from nybble.models.linear import Linear


class _ReLUSquared(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _relu(x).square_()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _relu(x).mul_(dy).mul_(2.0)


def _relu(x: Tensor) -> Tensor:
    """A tensor of its own."""
    return torch.clamp(x, min=0.0, out=fresh(*x.shape)) if by_hand(x) else F.relu(x)


class ReLUSquared(nn.Module):
    """max(x, 0)^2 (arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return _ReLUSquared.apply(x)


class MLP(nn.Module):
    """[..., H] -> [..., H] through `width` features."""

    def __init__(self, config: NemotronHConfig, width: int) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ReLUSquared()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class Experts(RoutedExperts):
    """E experts without a gate, as stacked matrices; their inputs may be narrower than the hidden states."""

    first_name = "up_proj"

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        E, width = config.n_routed_experts, config.moe_intermediate_size
        size = config.moe_latent_size or config.hidden_size
        self.up_proj = nn.Parameter(torch.empty(E, width, size))
        self.down_proj = nn.Parameter(torch.empty(E, size, width))
        self.act_fn = ReLUSquared()

    def activate(self, h: Tensor) -> Tensor:
        return self.act_fn(h)

    def by_pass(self) -> "_ReLUSquaredPass":
        return _ReLUSquaredPass()


class _ReLUSquaredPass:
    """The activation for CPUs."""

    def forward(self, h: Tensor) -> Tensor:
        return F.relu(h).square_()

    def backward(self, h: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        root = F.relu(h)
        y = root.square()
        dw = torch.linalg.vecdot(dy, y)
        return root.mul_(dy).mul_(2.0 * w[:, None]), y.mul_(w[:, None]), dw


class Router(nn.Module):
    """hidden [T, H] -> logits [T, E], weights [T, k] (FP32), experts [T, k] (int64).

    Sigmoid scores in FP32; the best `topk_group` groups of experts by the sum of their two best biased
    scores, then the best k experts of those. `e_score_correction_bias` [E] shifts which experts are chosen,
    not how they are weighed; the trainer moves it to balance load (arXiv 2408.15664).
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.top_k, self.gain = config.num_experts_per_tok, config.routed_scaling_factor
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.normalise = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.float(), self.weight.float())
        scores = torch.sigmoid(logits)
        biased = scores + self.e_score_correction_bias.float()
        if self.kept_groups < self.groups:
            grouped = biased.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.kept_groups, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            biased = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        experts = biased.topk(self.top_k, dim=-1, sorted=False).indices
        return logits, self.weigh(scores, experts), experts

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Weights [T, k] of given experts [T, k] by their scores [T, E]."""
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.gain


class MoE(nn.Module):
    """Routed experts, perhaps between two projections to a narrower space, plus a shared MLP.

    [B, S, H] -> [B, S, H], and how many rows each expert got [E] int64.
    """

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.experts = Experts(config)
        self.gate = Router(config)
        self.shared_experts = MLP(config, config.moe_shared_expert_intermediate_size)
        self.fc1_latent_proj: nn.Module = nn.Identity()
        self.fc2_latent_proj: nn.Module = nn.Identity()
        if latent is not None:
            self.fc1_latent_proj = Linear(hidden, latent, bias=config.mlp_bias)
            self.fc2_latent_proj = Linear(latent, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        _, weights, experts = self.gate(flat)
        counts = count_rows(experts, self.gate.weight.shape[0])
        latent = self.fc1_latent_proj(flat)
        if getattr(self.experts, "exchange", None) is None:
            routed, shared = self.experts(latent, experts, weights), self.shared_experts(x)
        else:  # other ranks have experts of this layer, and tokens are on their way to them meanwhile
            done: list[Tensor] = []
            work = partial(_into, done, self.shared_experts, x)
            routed = self.experts(latent, experts, weights, meanwhile=work)
            (shared,) = done
        return self.fc2_latent_proj(routed).view(x.shape) + shared, counts


def _into(done: list[Tensor], module: nn.Module, x: Tensor) -> None:
    done.append(module(x))
