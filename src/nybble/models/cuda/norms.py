"""RMS norm and L2 clip of rows, as `cpu/norms.py` has them, from and to any floating dtype."""
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.sums import add
from nybble.models.cuda.tiles import PARTS, dense, empty_like, load_sum, parts, tile

WARPS = 4
"""Of a tile of heads."""

HEAD_PARTS = 4 * PARTS
"""Most warps that share out the gradient of a scale of heads: their partial sums are short."""


@triton.jit(do_not_specialize=["R"])
def rms_forward(
    x_ptr, weight_ptr, y_ptr, R, eps,
    D: tl.constexpr, WEIGHTED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)[None, :]
    mask = (r < R)[:, None] & (d < D)
    at = r[:, None] * D + d
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    if WEIGHTED:
        y = y * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def rms_backward(
    dy_ptrs, x_ptr, weight_ptr, dx_ptr, dweight_ptr, R, eps,
    D: tl.constexpr, WEIGHTED: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)[None, :]
    total = tl.zeros((BR, BD), tl.float32)
    for step in range(EACH):
        r = (tl.program_id(0).to(tl.int64) * EACH + step) * BR + tl.arange(0, BR)
        mask = (r < R)[:, None] & (d < D)
        at = r[:, None] * D + d
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        x = x * rstd
        dy = load_sum(dy_ptrs, at, mask)
        if WEIGHTED:
            total += dy * x
            dy = dy * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        dx = (dy - x * (tl.sum(dy * x, 1, keep_dims=True) / D)) * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if WEIGHTED:
        part = tl.arange(0, BD)
        tl.store(dweight_ptr + tl.program_id(0) * D + part, tl.sum(total, 0), mask=part < D)


class RMS(torch.autograd.Function):
    """x [..., D], weight [D] or None -> `copies` times one tensor in `dtype`; see `mix.Mix` on copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype, copies: int
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        D, y = x.shape[-1], empty_like(x, dtype)
        R = x.numel() // D
        BR, BD, warps = tile(D)
        if R:
            rms_forward[(triton.cdiv(R, BR),)](
                x, weight, y, R, eps, D, weight is not None, BR, BD, num_warps=warps, enable_fp_fusion=True
            )
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, *(y.view_as(y) for _ in range(copies - 1))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        D, dx = x.shape[-1], empty_like(x)
        R = x.numel() // D
        BR, BD, warps = tile(D)
        programs, each = triton.cdiv(R, BR), 1
        sums = None
        if weight is not None:
            programs, each = parts(R, BR, warps)
            sums = torch.empty(1, programs, D, dtype=torch.float32, device=x.device)
        if R:
            rms_backward[(programs,)](
                dense(dys), x, weight, dx, sums, R, ctx.eps, D, weight is not None, each, BR, BD,
                num_warps=warps, enable_fp_fusion=True,
            )  # fmt: skip
        return dx, None if sums is None else add(sums, weight.dtype)[0], None, None, None


@triton.jit(do_not_specialize=["T", "heads"])
def clip_forward(
    x_ptr, scale_ptr, gain_ptr, y_ptr, T, heads, limit, eps,
    D: tl.constexpr, SCALED: tl.constexpr, GAIN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)[None, :]
    head = tl.program_id(1)
    mask = (t < T)[:, None] & (d < D)
    at = (t[:, None] * heads + head) * D + d
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scale_ptr + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    shrink = tl.minimum(limit / (tl.sqrt(tl.sum(x * x, 1, keep_dims=True)) + eps), 1.0)
    if GAIN:
        shrink = shrink * tl.load(gain_ptr + t, mask=t < T, other=0.0)[:, None]
    tl.store(y_ptr + at, (x * shrink).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "heads"])
def clip_backward(
    dy_ptr, x_ptr, scale_ptr, gain_ptr, dx_ptr, dscale_ptr, T, heads, limit, eps,
    D: tl.constexpr, SCALED: tl.constexpr, GAIN: tl.constexpr, EACH: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)[None, :]
    head = tl.program_id(1)
    total = tl.zeros((BT, BD), tl.float32)
    for step in range(EACH):
        t = (tl.program_id(0).to(tl.int64) * EACH + step) * BT + tl.arange(0, BT)
        mask = (t < T)[:, None] & (d < D)
        at = (t[:, None] * heads + head) * D + d
        raw = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = raw
        if SCALED:
            x = x * tl.load(scale_ptr + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1, keep_dims=True))
        shrink = limit / (norm + eps)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if GAIN:
            dy = dy * tl.load(gain_ptr + t, mask=t < T, other=0.0)[:, None]
        # a clipped vector keeps only a part of the gradient along itself
        along = tl.sum(dy * x, 1, keep_dims=True)
        pull = tl.where(shrink < 1.0, shrink * along / (norm * (norm + eps)), 0.0)
        dx = dy * tl.minimum(shrink, 1.0) - x * pull
        if SCALED:
            total += dx * raw
            dx = dx * tl.load(scale_ptr + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if SCALED:
        part = tl.arange(0, BD)
        row = tl.program_id(0) * heads + head
        tl.store(dscale_ptr + row * D + part, tl.sum(total, 0), mask=part < D)


class L2Clip(torch.autograd.Function):
    """x [..., heads, D], scale [heads, D] or None, gain [tokens] or None -> the shape of x, in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        gain: Tensor | None,
        limit: float,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        gain = None if gain is None else gain.contiguous()
        (heads, D), y = x.shape[-2:], empty_like(x, dtype)
        T = x.numel() // (heads * D)
        BT, BD, warps = tile(D, WARPS)
        if T:
            clip_forward[(triton.cdiv(T, BT), heads)](
                x, scale, gain, y, T, heads, limit, eps, D, scale is not None, gain is not None, BT, BD,
                num_warps=warps, enable_fp_fusion=True,
            )  # fmt: skip
        ctx.save_for_backward(x, scale, gain)
        ctx.limits = (limit, eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, gain = ctx.saved_tensors
        (heads, D), dx = x.shape[-2:], empty_like(x)
        T = x.numel() // (heads * D)
        BT, BD, warps = tile(D, WARPS)
        programs, each = triton.cdiv(T, BT), 1
        sums = None
        if scale is not None:
            programs, each = parts(T, BT, warps * heads, HEAD_PARTS)
            sums = torch.empty(1, programs, heads, D, dtype=torch.float32, device=x.device)
        if T:
            clip_backward[(programs, heads)](
                dy.contiguous(), x, scale, gain, dx, sums, T, heads, *ctx.limits,
                D, scale is not None, gain is not None, each, BT, BD, num_warps=warps, enable_fp_fusion=True,
            )  # fmt: skip
        return dx, None if sums is None else add(sums, scale.dtype)[0], None, None, None, None
