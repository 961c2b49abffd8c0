"""Attention residuals: a layer's input is a learned mixture of finished blocks and the running one.

Each source is RMS-normalised; a learned query scores it; a softmax over sources mixes them. Finished blocks
never change, so they come normalised once and are shared by all later layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nybble.models.norms import by_hand, rms_norm, row_dot

EPS = 1e-6


class _Mix(torch.autograd.Function):
    """query [n, H], partial [T, H], blocks: m times [T, H] -> n times [T, H]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, partial: Tensor, *blocks: Tensor) -> tuple[Tensor, ...]:
        n, H = query.shape
        q = query * H**-0.5
        norm = torch.linalg.vector_norm(partial, dim=-1, keepdim=True)
        rstd = norm.square_().div_(H).add_(EPS).rsqrt_()  # [T, 1]
        scores = torch.stack([*(x @ q.T for x in blocks), (partial @ q.T) * rstd], dim=-1)  # [T, n, m + 1]
        weights = torch.softmax(scores, dim=-1)
        outs = []
        for i in range(n):
            out = partial * (weights[:, i, -1:] * rstd)
            for j, x in enumerate(blocks):
                out.addcmul_(x, weights[:, i, j : j + 1])
            outs.append(out)
        ctx.save_for_backward(q, partial, rstd, scores[..., -1], weights, *blocks)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q, partial, rstd, last, weights, *blocks = ctx.saved_tensors
        n, H = q.shape
        dweights = torch.stack(
            [
                torch.cat([*(row_dot(d, x) for x in blocks), row_dot(d, partial) * rstd], dim=-1)
                for d in douts
            ],
            dim=1,
        )
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dq = torch.zeros_like(q)
        dblocks: list[Tensor | None] = []
        for j, x in enumerate(blocks):
            ds = dscores[..., j]
            dq.addmm_(ds.T, x)
            if not ctx.needs_input_grad[2 + j]:
                dblocks.append(None)
                continue
            dx = ds @ q
            for i in range(n):
                dx.addcmul_(douts[i], weights[:, i, j : j + 1])
            dblocks.append(dx)
        ds, w = dscores[..., -1], weights[..., -1]
        dq.addmm_((ds * rstd).T, partial)
        # through the norm: the gradient along the normalised partial is known without another pass
        along = (w * dweights[..., -1] + ds * last).sum(-1, keepdim=True)
        dpartial = (ds * rstd) @ q
        for i in range(n):
            dpartial.addcmul_(douts[i], w[:, i : i + 1] * rstd)
        dpartial.addcmul_(partial, along * rstd * rstd / -H)
        return dq * H**-0.5, dpartial, *dblocks


class BlockAttentionResidual(nn.Module):
    """Mixes finished blocks (normalised, FP32) and the running one into one input per query.

    `query` is [H] for one query and [n, H] for n. forward(blocks: m times [B, S, H], partial [B, S, H])
    returns n FP32 tensors [B, S, H].
    """

    def __init__(self, hidden: int, queries: int = 1) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros((hidden,) if queries == 1 else (queries, hidden)))

    def forward(self, blocks: tuple[Tensor, ...], partial: Tensor) -> tuple[Tensor, ...]:
        H = partial.shape[-1]
        query = self.query.float().view(-1, H)
        partial = partial.float()
        if by_hand(partial):
            outs = _Mix.apply(query, partial.reshape(-1, H), *(x.reshape(-1, H) for x in blocks))
            return tuple(out.view(partial.shape) for out in outs)
        sources = torch.stack([*blocks, rms_norm(partial, None, EPS)], dim=-2)  # [B, S, m + 1, H]
        weights = torch.softmax(sources @ (query * H**-0.5).T, dim=-2)  # [B, S, m + 1, n]
        return (weights.transpose(-1, -2) @ sources).unbind(-2)
