"""Log-probabilities of given tokens under a head, by chunks, differentiable in hidden states and head.

A policy-gradient loss weighs each token by something that depends on its own log-probability, so gradients
cannot be formed in the forward pass as `loss.head_loss` does: the backward pass computes each chunk's logits
once more. Legend: T tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from nybble.models.loss import CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS


def capped_logits(hidden: Tensor, head: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(hidden [T, H] @ head [V, H].T / cap), FP32 [T, V]; without a cap the product alone."""
    logits = (hidden @ head.to(hidden.dtype).T).float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part in _chunks(hidden, head):
            logits = capped_logits(hidden[part], head, cap)
            every = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
            logprobs[part] = every.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(every.exp() * every).sum(-1)
        ctx.save_for_backward(hidden, head, targets)
        ctx.cap, ctx.temperature = cap, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, dlogprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets = ctx.saved_tensors
        weight = head.to(hidden.dtype)
        need_hidden, need_head = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if need_hidden else None
        dhead = torch.zeros_like(head, dtype=torch.float32) if need_head else None
        for part in _chunks(hidden, head):
            x = hidden[part]
            logits = capped_logits(x, head, ctx.cap)
            p = torch.softmax(logits / ctx.temperature, dim=-1)
            share = dlogprobs[part, None] / ctx.temperature
            d = p.mul_(-share).scatter_add_(1, targets[part, None], share)
            if ctx.cap is not None:
                # through cap * tanh(z / cap): times 1 - tanh^2
                d.mul_(1.0 - (logits / ctx.cap).square_())
            d = d.to(hidden.dtype)
            if dhidden is not None:
                torch.mm(d, weight, out=dhidden[part])
            if dhead is not None:
                dhead += (d.T @ x).float()
        return dhidden, None if dhead is None else dhead.to(head.dtype), None, None, None


def _chunks(hidden: Tensor, head: Tensor) -> list[slice]:
    elements = CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS
    rows = max(16, elements // max(head.shape[0], 1))
    return [slice(start, start + rows) for start in range(0, hidden.shape[0], rows)]


def token_log_probs(
    hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """ln p of each target at a temperature, and the entropy of each distribution (without gradient).

    Args:
        hidden: [T, H].
        head: [V, H].
        targets: [T] int64.
        cap: soft cap of the logits, or None.
        temperature: divides the logits, above 0.

    Returns:
        [T] and [T], FP32, in nats.
    """
    return _TokenLogProbs.apply(hidden, head, targets, cap, temperature)
