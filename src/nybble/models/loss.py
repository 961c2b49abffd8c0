"""Cross entropy of a language-model head by chunks of tokens: logits of all tokens never exist.

The gradients of a chunk's logits are at hand when its loss is, so the forward pass computes the gradients of
hidden states and head, and the backward pass only scales them (as in Liger kernel, arXiv 2410.10989).
"""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position that has no target."""

CHUNK_ELEMENTS = 1 << 20
"""Logits of one chunk on a CPU: 4 MiB in FP32."""

CUDA_CHUNK_ELEMENTS = 1 << 28


def _chunk_rows(hidden: Tensor, vocabulary: int) -> int:
    elements = CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS
    return max(16, elements // max(vocabulary, 1))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        T, V = hidden.shape[0], head.shape[0]
        needs_hidden, needs_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weight = head.to(hidden.dtype)
        nll = torch.zeros(T, dtype=torch.float32, device=hidden.device)
        counted = labels != IGNORE
        targets = torch.where(counted, labels, 0)
        mean = 1.0 / counted.sum().clamp(min=1).float()
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dhead = torch.zeros_like(head, dtype=torch.float32) if needs_head else None
        rows = _chunk_rows(hidden, V)
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            x = hidden[part]
            squashed = (x @ weight.T).float().mul_(1.0 / cap).tanh_()
            aim, keep = targets[part, None], counted[part, None]
            logits = squashed * cap
            picked = logits.gather(1, aim)
            # logits lie within the cap, so that exp neither overflows nor vanishes once the cap is taken off
            d = logits.sub_(cap).exp_()
            total = d.sum(-1, keepdim=True)
            nll[part] = torch.where(keep, total.log() + (cap - picked), 0.0)[:, 0]
            if dhidden is None and dhead is None:
                continue
            share = torch.where(keep, mean, 0.0)
            d.mul_(share / total)
            d.scatter_add_(1, aim, -share)
            # through cap * tanh(z / cap): times 1 - tanh^2
            d = d.addcmul_(d, squashed.square_(), value=-1.0).to(hidden.dtype)
            if dhidden is not None:
                torch.mm(d, weight, out=dhidden[part])
            if dhead is not None:
                if d.dtype == torch.float32:
                    dhead.addmm_(d.T, x)
                else:
                    dhead += d.T @ x
        ctx.save_for_backward(dhidden, dhead)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(nll)
        return nll.sum() * mean, nll

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dhidden, dhead = ctx.saved_tensors
        return (
            None if dhidden is None else dhidden * dloss.to(dhidden.dtype),
            None if dhead is None else (dhead * dloss).to(ctx.head_dtype),
            None,
            None,
        )


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of cap * tanh(hidden @ head.T / cap) against labels, and the loss of each token.

    Args:
        hidden: [T, H].
        head: [vocabulary, H].
        labels: [T] int64, -100 where there is no target.
        cap: the soft cap of the logits.

    Returns:
        The mean over targets (0 if there is none), FP32, differentiable; and [T] FP32 in nats without
        gradient, 0 where there is no target.
    """
    return _HeadLoss.apply(hidden, head, labels, cap)
