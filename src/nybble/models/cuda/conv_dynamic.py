"""Short convolution whose taps are learned ones per channel plus ones computed per token and head.

    y[t, h, d] = unit * sum over lags l of (static[l, h, d] + dynamic[t, h, l] + (l == 0)) * x[t - l, h, d]
with unit = 1 / sqrt(2 K + 1), K taps, h of `heads` heads of D channels. See `conv.py` for how programs walk.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.conv import backward, onward, pushed, row, walks
from nybble.models.cuda.sums import add
from nybble.models.cuda.tiles import empty_like

PARTS = 512
COLUMNS = 256
"""Channels of a program, a warp: eight a thread."""


@triton.jit
def _static(static_ptr, c, here, C, K: tl.constexpr):
    """K times [heads, D]: what of the taps is the same for all tokens."""
    out = ()
    for lag in tl.static_range(K):
        w = tl.load(static_ptr + lag * C + c, mask=here, other=0.0).to(tl.float32)
        out = out + (w + 1.0 if lag == 0 else w,)
    return out


@triton.jit(do_not_specialize=["T", "S"])
def dynamic_conv_forward(
    x_ptr, static_ptr, dynamic_ptr, start_ptr, y_ptr, T, S, unit, heads: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, STARTS: tl.constexpr, EACH: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = heads * D
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    d = tl.arange(0, BD)[None, :]
    here, c = (h < heads) & (d < D), h * D + d
    static = _static(static_ptr, c, here, C, K)
    first = tl.program_id(0).to(tl.int64) * EACH
    position = (first % S).to(tl.int32)
    past = ()
    for lag in tl.static_range(1, K):
        past = past + (row(x_ptr, first - lag, (first >= lag) & (first < T) & here, c, C),)
    for step in range(EACH):
        t = first + step
        inside = t < T
        reach = position
        if STARTS:
            reach -= tl.maximum(tl.load(start_ptr + t, mask=inside, other=0), 0)
        x = row(x_ptr, t, inside & here, c, C)
        at = dynamic_ptr + (t * heads + h) * K
        own = inside & (h < heads)
        y = x * (static[0] + tl.load(at, mask=own, other=0.0).to(tl.float32))
        for lag in tl.static_range(1, K):
            tap = static[lag] + tl.load(at + lag, mask=own, other=0.0).to(tl.float32)
            y += tl.where(reach >= lag, past[lag - 1], 0.0) * tap
        tl.store(y_ptr + t * C + c, (y * unit).to(y_ptr.dtype.element_ty), mask=inside & here)
        position = onward(position, S)
        if K > 1:
            past = pushed((x,), past)


@triton.jit(do_not_specialize=["T", "S"])
def dynamic_conv_backward(
    dy_ptr, x_ptr, static_ptr, dynamic_ptr, start_ptr, dx_ptr, dstatic_ptr, ddynamic_ptr, T, S, unit,
    heads: tl.constexpr, D: tl.constexpr, K: tl.constexpr, STARTS: tl.constexpr, EACH: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Partial sums of the static taps' gradient go to row program_id(0) of [programs, K, C]."""
    C: tl.constexpr = heads * D
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    d = tl.arange(0, BD)[None, :]
    here, c = (h < heads) & (d < D), h * D + d
    static = _static(static_ptr, c, here, C, K)
    last = (tl.program_id(0).to(tl.int64) + 1) * EACH - 1
    position = (last % S).to(tl.int32)
    later = ()
    sums = (tl.zeros((BH, BD), tl.float32),)
    for lag in tl.static_range(1, K):
        later = later + (row(dy_ptr, last + lag, (last + lag < T) & here, c, C) * unit,)
        sums = sums + (tl.zeros((BH, BD), tl.float32),)
    for step in range(EACH):
        t = last - step
        inside = t < T
        x = row(x_ptr, t, inside & here, c, C)
        dy = row(dy_ptr, t, inside & here, c, C) * unit
        own = inside & (h < heads)
        at = (t * heads + h) * K
        dx = dy * (static[0] + tl.load(dynamic_ptr + at, mask=own, other=0.0).to(tl.float32))
        product = dy * x
        more = (sums[0] + product,)
        part = tl.sum(product, 1, keep_dims=True)
        tl.store(ddynamic_ptr + at, part.to(ddynamic_ptr.dtype.element_ty), mask=own)
        for lag in tl.static_range(1, K):
            sees = inside & (position + lag < S)  # whether the token `lag` behind saw this one
            if STARTS:
                sees = sees & (position >= tl.load(start_ptr + t + lag, mask=sees, other=0))
            at = ((t + lag) * heads + h) * K + lag
            own = sees & (h < heads)
            g = tl.where(sees, later[lag - 1], 0.0)
            dx += g * (static[lag] + tl.load(dynamic_ptr + at, mask=own, other=0.0).to(tl.float32))
            product = g * x
            more = more + (sums[lag] + product,)
            part = tl.sum(product, 1, keep_dims=True)
            tl.store(ddynamic_ptr + at, part.to(ddynamic_ptr.dtype.element_ty), mask=own)
        sums = more
        tl.store(dx_ptr + t * C + c, dx.to(dx_ptr.dtype.element_ty), mask=inside & here)
        position = backward(position, S)
        if K > 1:
            later = pushed((dy,), later)
    for lag in tl.static_range(K):
        tl.store(dstatic_ptr + (tl.program_id(0) * K + lag) * C + c, sums[lag], mask=here)


class DynamicConv(torch.autograd.Function):
    """x [B, S, heads * D], static [K, heads * D], dynamic [B, S, heads * K], starts [B, S] (see `Context`) or
    None -> the shape of x, in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, static: Tensor, dynamic: Tensor, starts: Tensor | None) -> Tensor:
        x, static, dynamic = x.contiguous(), static.contiguous(), dynamic.contiguous()
        starts = None if starts is None else starts.contiguous()
        y, sizes = empty_like(x), _sizes(x, static, dynamic)
        programs, each = walks(x.shape[0] * x.shape[1], 2 * PARTS)
        if x.numel():
            BH, BD = _tile(*sizes[3:5])
            dynamic_conv_forward[(programs, triton.cdiv(sizes[3], BH))](
                x,
                static,
                dynamic,
                starts,
                y,
                *sizes,
                starts is not None,
                each,
                BH,
                BD,
                num_warps=1,
                enable_fp_fusion=True,
            )
        ctx.save_for_backward(x, static, dynamic, starts)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, static, dynamic, starts = ctx.saved_tensors
        dx, sizes = empty_like(x), _sizes(x, static, dynamic)
        ddynamic = torch.zeros_like(dynamic)  # taps that reach too far back have no gradient
        programs, each = walks(x.shape[0] * x.shape[1], 2 * PARTS)
        sums = torch.empty(1, programs, *static.shape, dtype=torch.float32, device=x.device)
        if x.numel():
            BH, BD = _tile(*sizes[3:5])
            dynamic_conv_backward[(programs, triton.cdiv(sizes[3], BH))](
                dy.contiguous(), x, static, dynamic, starts, dx, sums, ddynamic, *sizes,
                starts is not None, each, BH, BD, num_warps=1, enable_fp_fusion=True,
            )  # fmt: skip
        return dx, add(sums, static.dtype)[0], ddynamic, None


def _sizes(x: Tensor, static: Tensor, dynamic: Tensor) -> tuple[int, int, float, int, int, int]:
    """(tokens, tokens of a sequence, unit, heads, D, K)."""
    B, S, C = x.shape
    K = static.shape[0]
    heads = dynamic.shape[-1] // K
    return B * S, S, (2 * K + 1) ** -0.5, heads, C // heads, K


def _tile(heads: int, D: int) -> tuple[int, int]:
    """(heads, channels of a head) of a program."""
    wide = triton.next_power_of_2(D)
    return max(1, min(triton.next_power_of_2(heads), COLUMNS // wide)), wide
