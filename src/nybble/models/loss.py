"""Cross entropy of a language-model head by chunks of tokens: logits of all tokens never exist.

The gradients of a chunk's logits are at hand when its loss is, so the forward pass computes the gradients of
hidden states and head, and the backward pass only scales them (as in Liger kernel, arXiv 2410.10989).
"""

from typing import Any

import torch
from torch import Tensor

from nybble.kernels.cpu.product import matmul
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.direct import by_hand
from nybble.models.cpu import head as fused
from nybble.models.cuda import on_gpu

IGNORE = -100
"""Label of a position that has no target."""

CHUNK_ELEMENTS = 1 << 20
"""Logits of one chunk on a CPU: 4 MiB in FP32."""

CUDA_CHUNK_ELEMENTS = 1 << 28


def _chunk_rows(hidden: Tensor, vocabulary: int) -> int:
    elements = CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS
    return max(16, elements // max(vocabulary, 1))


def _rows(z: Tensor, labels: Tensor, cap: float | None, share: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of each row [n], share * its gradient [n, V]) for z [n, V] before its cap; overwrites z."""
    if on_gpu(z):
        from nybble.models.cuda import head

        return head.rows(z, labels, cap, share, IGNORE), z
    dtype, z = z.dtype, z.float()
    if z.device.type == "cpu" and (cap is None or cap <= fused.LARGEST_CAP):
        return fused.rows(z, labels, cap, share), z.to(dtype)
    return plain_rows(z, labels, cap, share), z.to(dtype)


def plain_rows(z: Tensor, labels: Tensor, cap: float | None, share: Tensor) -> Tensor:
    """Loss of each row [n] of FP32 z [n, V] before its cap, if any; z becomes share * d loss / d z."""
    keep = (labels != IGNORE)[:, None]
    aim = torch.where(keep, labels[:, None], 0)
    logits = z if cap is None else z.div_(cap).tanh_() * cap
    picked = logits.gather(1, aim)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    weight = torch.where(keep, share, 0.0)
    d = logits.sub_(lse).exp_().mul_(weight).scatter_add_(1, aim, -weight)
    if cap is not None:
        # through cap * tanh(z / cap): times 1 - tanh^2
        z.square_().neg_().add_(1.0).mul_(d)
    return torch.where(keep, lse - picked, 0.0)[:, 0]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        T, V = hidden.shape[0], head.shape[0]
        needs_hidden, needs_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weight = head.to(hidden.dtype)
        nll = torch.zeros(T, dtype=torch.float32, device=hidden.device)
        share = 1.0 / (labels != IGNORE).sum().clamp(min=1).float()
        product, empty = (matmul, fresh) if by_hand(hidden) else (_product, hidden.new_empty)
        dhidden = empty(*hidden.shape) if needs_hidden else None
        dhead: Tensor | None = None
        rows = _chunk_rows(hidden, V)
        buffer = empty(min(rows, T), V)  # for all chunks
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            x = hidden[part]
            z = product(x, weight.T, buffer[: x.shape[0]])
            nll[part], d = _rows(z, labels[part], cap, share)
            if dhidden is not None:
                product(d, weight, dhidden[part])
            if needs_head:
                dhead = _head_gradient(d, x, dhead)
        if needs_head and dhead is None:
            dhead = torch.zeros_like(head, dtype=torch.float32)
        ctx.save_for_backward(dhidden, dhead)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(nll)
        return nll.sum() * share, nll

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dhidden, dhead = ctx.saved_tensors
        return (
            None if dhidden is None else _scaled(dhidden, dloss.to(dhidden.dtype)),
            None if dhead is None else _scaled(dhead, dloss).to(ctx.head_dtype),
            None,
            None,
        )


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return torch.mul(x, factor, out=fresh(*x.shape)) if by_hand(x) else x * factor


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


def _head_gradient(d: Tensor, x: Tensor, before: Tensor | None) -> Tensor:
    """FP32 d [n, V].T @ x [n, H], added to what chunks before left."""
    if by_hand(d):
        out = fresh(d.shape[1], x.shape[1]) if before is None else before
        return matmul(d.T, x, out, add=before is not None)
    if d.dtype == torch.float32:
        return d.T @ x if before is None else before.addmm_(d.T, x)
    whole = d.is_cuda and d.dtype == torch.bfloat16
    product = torch.mm(d.T, x, out_dtype=torch.float32) if whole else (d.T @ x).float()
    return product if before is None else before.add_(product)


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of cap * tanh(hidden @ head.T / cap) against labels, and the loss of each token.

    Args:
        hidden: [T, H].
        head: [vocabulary, H].
        labels: [T] int64, -100 where there is no target.
        cap: the soft cap of the logits, or None.

    Returns:
        The mean over targets (0 if there is none), FP32, differentiable; and [T] FP32 in nats without
        gradient, 0 where there is no target.
    """
    return _HeadLoss.apply(hidden, head, labels, cap)
