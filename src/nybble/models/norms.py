"""RMS norm, plain or gated, and L2 clip over the last axis, computed in FP32.

On a CPU and on a GPU each is one pass of a fused kernel; elsewhere, and under `torch.compile`, it is the
plain formula, which the compiler fuses.
"""

from typing import Any

import torch
from torch import Tensor

from nybble.kernels.cpu.scratch import copied
from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import gated
from nybble.models.cpu import norms as fused
from nybble.models.cuda import on_gpu

CLIP_EPS = fused.CLIP_EPS
"""Added to a norm before dividing by it, as the published model does."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y, rstd = fused.rms(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = fused.rms_backward(dy, x, weight, rstd)
        return dx, None if weight is None else dweight, None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype = torch.float32, copies: int = 1
) -> Any:
    """x / sqrt(mean(x^2) + eps), times `weight` [last axis] if given; same shape, in `dtype`.

    With `copies` a tuple of one tensor that many times, for as many readers: their gradients are added in the
    backward pass of the norm, on GPUs.
    """
    if on_gpu(x):
        from nybble.models.cuda.norms import RMS

        ys = RMS.apply(x, weight, eps, dtype, copies)
        return ys if copies > 1 else ys[0]
    if by_hand_in_any_mode(x.float()):
        y = _RMSNorm.apply(x.float(), None if weight is None else weight.float(), eps).to(dtype)
    else:
        y = plain_rms_norm(x, weight, eps).to(dtype)
    return (y,) * copies if copies > 1 else y


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms_norm` as a formula, in FP32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        gate = copied(gate)  # of a slice: once, not in both directions
        y, rstd = gated.forward(x, gate, weight, groups, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *gated.backward(dy, *ctx.saved_tensors), None, None


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMS norm of x * silu(gate) over each of `groups` equal parts of the last axis, times `weight`; FP32."""
    x, gate, weight = x.float(), gate.float(), weight.float()
    if by_hand_in_any_mode(x) and x.numel():
        return _GatedRMSNorm.apply(x, gate, weight, groups, eps)
    y = (x * torch.nn.functional.silu(gate)).unflatten(-1, (groups, -1))
    return rms_norm(y, None, eps).flatten(-2) * weight


class _L2Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gain: Tensor | None, threshold: float) -> Tensor:
        y, norms = fused.clip(x, scale, gain, threshold)
        ctx.save_for_backward(x, scale, gain, norms)
        ctx.threshold = threshold
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, gain, norms = ctx.saved_tensors
        dx, dscale = fused.clip_backward(dy, x, scale, gain, ctx.threshold, norms)
        return dx, dscale, None, None


def l2_clip(
    x: Tensor,
    threshold: float,
    scale: Tensor | None = None,
    gain: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Shrink each last-axis vector of x * scale to an L2 norm of at most `threshold`; multiply by `gain`.

    Args:
        x: [..., heads, D].
        threshold: largest norm; shorter vectors stay.
        scale: [heads, D], learned, or None for ones.
        gain: broadcastable to [..., 1, 1], without gradient, or None for ones.

    Returns:
        The shape of x, in `dtype`.
    """
    gpu = on_gpu(x)
    if not gpu and not by_hand_in_any_mode(x.float()):
        return plain_l2_clip(x, threshold, scale, gain).to(dtype)
    if gain is not None:
        gain = gain.expand(*x.shape[:-2], 1, 1).reshape(-1)
    if gpu:
        from nybble.models.cuda.norms import L2Clip

        return L2Clip.apply(x, scale, gain, threshold, CLIP_EPS, dtype)
    x = x.float()
    scale = x.new_ones(x.shape[-2:]) if scale is None else scale.float()
    return _L2Clip.apply(x, scale, gain, threshold).to(dtype)


def plain_l2_clip(x: Tensor, threshold: float, scale: Tensor | None, gain: Tensor | None) -> Tensor:
    """`l2_clip` as a formula, in FP32."""
    x = x.float()
    y = x if scale is None else x * scale.float()
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    y = y * (threshold / (norm + CLIP_EPS)).clamp(max=1.0)
    return y if gain is None else y * gain


class RMSNorm(torch.nn.Module):
    """RMS norm with a learned weight [H]; FP32 inside, the input's dtype outside unless told otherwise (arXiv
    1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, copies: int = 1) -> Any:
        """x [..., H] -> the same shape; see `rms_norm` on `copies`."""
        return rms_norm(x, self.weight, self.eps, dtype or x.dtype, copies)
