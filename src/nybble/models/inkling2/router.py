"""Sigmoid router: the k experts of a token by biased score, their weights by unbiased score."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.kernels.cpu.product import tiles
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import router as fused
from nybble.models.cuda import on_gpu

MOST_EXPERTS = 256
"""Experts that the kernel for GPUs serves."""

PARTS = 64
"""Parts of the tokens whose gradients of a router are computed side by side on a GPU: the product over all of
them at once is a thin one that keeps few multiprocessors busy."""


class _Logits(torch.autograd.Function):
    """hidden [T, H] and weight [E, H] -> logits [T, E], all products in FP32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        dhidden = (d @ weight.float()).to(hidden.dtype) if need_hidden else None
        if not need_weight:
            return dhidden, None
        x, parts = hidden.float(), PARTS if d.is_cuda and d.shape[0] % PARTS == 0 else 1
        if parts == 1:
            return dhidden, (d.T @ x).to(weight.dtype)
        dweight = torch.bmm(d.view(parts, -1, d.shape[1]).transpose(1, 2), x.view(parts, -1, x.shape[1]))
        return dhidden, dweight.sum(0).to(weight.dtype)


class _Routed(torch.autograd.Function):
    """hidden [T, H] and weight [E, H] -> what the router returns, on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, shift: Tensor, k: int, gain: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # by tiles for any number of tokens, so that a token's choice does not depend on others
        logits = tiles(hidden, weight.T, fresh(len(hidden), len(weight)))
        scores, experts, weights = fused.choose(logits, shift, k, gain)
        ctx.save_for_backward(hidden, weight, scores, experts)
        ctx.gain = gain
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts)
        return logits, weights, experts

    @staticmethod
    def backward(
        ctx: Any, dlogits: Tensor | None, dweights: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, scores, experts = ctx.saved_tensors
        d = (
            torch.zeros_like(scores)
            if dweights is None
            else fused.backward(dweights, scores, experts, ctx.gain)
        )
        d = d if dlogits is None else d + dlogits
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden = tiles(d, weight, fresh(*hidden.shape)) if need_hidden else None
        dweight = tiles(d.T, hidden, fresh(*weight.shape)) if need_weight else None
        return dhidden, dweight, None, None, None


class Router(nn.Module):
    """hidden [T, H] -> logits [T, E], weights [T, k] (FP32), experts [T, k] (int64).

    Runs in FP32. `e_score_correction_bias` [E] shifts which experts are chosen, not how they are weighed;
    the trainer moves it to balance load (arXiv 2408.15664).
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__()
        self.top_k, self.gain = config.num_experts_per_tok, config.route_scale
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if on_gpu(hidden) and hidden.dtype == torch.bfloat16 and self.weight.shape[0] <= MOST_EXPERTS:
            from nybble.models.cuda.router import Route

            bias = self.e_score_correction_bias
            return Route.apply(hidden, self.weight, bias, self.top_k, self.gain)
        if by_hand_in_any_mode(hidden) and self.weight.dtype == torch.float32:
            return _Routed.apply(hidden, self.weight, self.e_score_correction_bias, self.top_k, self.gain)
        logits = _Logits.apply(hidden, self.weight)
        scores = torch.sigmoid(logits)
        experts = torch.topk(
            scores + self.e_score_correction_bias.float(), self.top_k, dim=-1, sorted=False
        ).indices
        return logits, self._weigh(scores, experts), experts

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights [T, k] of any experts [T, k] from the logits [T, E]."""
        weights = self._weigh(torch.sigmoid(logits), experts)
        if not on_gpu(logits):
            return weights
        from nybble.models.cuda import router

        # the bits of a pass that chose by itself; the gradient is that of the formula
        return weights + (router.weigh(logits, experts, self.gain) - weights.detach())

    def _weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        weights = scores.gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.gain
