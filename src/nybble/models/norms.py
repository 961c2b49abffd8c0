"""RMS norm and L2 clip over the last axis, computed in FP32.

On a CPU each is one `autograd.Function` that keeps its input and one number a row for the backward pass;
elsewhere, and under `torch.compile`, it is the plain formula, which the compiler fuses.
"""

from typing import Any

import torch
from torch import Tensor

CLIP_EPS = 1e-6
"""Added to a norm before dividing by it, as the published model does."""


def by_hand(x: Tensor) -> bool:
    """Whether to take the hand-written passes (eager FP32 on a CPU) and not the plain formula."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b over the last axis, kept as an axis of size 1."""
    return (a * b).sum(-1, keepdim=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rstd = norm.square_().div_(max(x.shape[-1], 1)).add_(eps).rsqrt_()
        y = x * rstd
        ctx.save_for_backward(x, weight, rstd)
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        dweight = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                # sum over rows of dy * x * rstd, as a product of a row vector and a matrix
                dweight = (rstd.reshape(1, -1) @ (dy * x).reshape(-1, x.shape[-1])).reshape(weight.shape)
            dy = dy * weight
        pull = row_dot(dy, x).mul_(rstd).mul_(rstd).mul_(rstd).div_(-max(x.shape[-1], 1))
        return torch.addcmul(dy * rstd, x, pull), dweight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times `weight` [last axis] if given; same shape, FP32."""
    x = x.float()
    if by_hand(x):
        return _RMSNorm.apply(x, weight, eps)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


class _L2Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, threshold: float, gain: Tensor | None) -> Tensor:
        y = x.clone() if scale is None else x * scale
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        shrink = (norm + CLIP_EPS).reciprocal_().mul_(threshold).clamp_(max=1.0)
        factor = shrink if gain is None else shrink * gain
        # NaN is not below 1 and needs no pull: it spreads through `factor` alone
        clipped = bool((shrink < 1.0).any())
        ctx.clipped = clipped
        ctx.save_for_backward(x, scale, factor, norm if clipped else None, shrink if clipped else None)
        return y.mul_(factor)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, scale, factor, norm, shrink = ctx.saved_tensors
        d = dy * factor
        if ctx.clipped:
            # a clipped vector keeps only a part of the gradient along itself
            scaled = x if scale is None else x * scale
            pull = row_dot(d, scaled) / (norm * (norm + CLIP_EPS)).clamp(min=torch.finfo(torch.float32).tiny)
            d = torch.addcmul(d, scaled, torch.where(shrink < 1.0, -pull, 0.0))
        if scale is None:
            return d, None, None, None
        dscale = (d * x).sum(tuple(range(x.dim() - scale.dim()))) if ctx.needs_input_grad[1] else None
        return d * scale, dscale, None, None


def l2_clip(x: Tensor, threshold: float, scale: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
    """Shrink each last-axis vector of x * scale to an L2 norm of at most `threshold`; multiply by `gain`.

    Args:
        x: [..., heads, D].
        threshold: largest norm; shorter vectors stay.
        scale: [heads, D], learned, or None for ones.
        gain: broadcastable to [..., heads, 1], without gradient, or None for ones.

    Returns:
        FP32, the shape of x.
    """
    x = x.float()
    scale = None if scale is None else scale.float()
    if by_hand(x):
        return _L2Clip.apply(x, scale, threshold, gain)
    y = x if scale is None else x * scale
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    y = y * (threshold / (norm + CLIP_EPS)).clamp(max=1.0)
    return y if gain is None else y * gain


class RMSNorm(torch.nn.Module):
    """RMS norm with a learned weight [H]; FP32 inside, the input's dtype outside (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype)
