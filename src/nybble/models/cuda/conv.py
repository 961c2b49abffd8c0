"""Short convolution of Inkling 2 over the sequence, with the residual that it is added to.

    y[t, c] = residual[t, c] + sum over lags l of tap[l, c] * x[t - l, c]
    tap[l, c] = (weight[c, K - 1 - l] + (l == 0)) / sqrt(K + 1)
Lags that reach before the sequence or the token's document count as zeros.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.sums import add
from nybble.models.cuda.tiles import empty_like

COLUMNS = 128
"""Channels of a warp: four a thread, so that it loads and stores BF16 and FP32 alike."""

STRIPS = 4
"""Warps of a program. Each walks over a strip of tokens and keeps the last K in registers; their sums become
one partial sum."""

PARTS, FORWARD_PARTS = 128, 512
"""Most programs along the tokens in a backward pass, each of which leaves a sum, and in a forward pass."""

STRIDE = 4
"""Tokens that a warp loads at once: it waits for memory once for all of them."""


@triton.jit
def _taps(weight_ptr, c, C, K: tl.constexpr, unit):
    """K times [1, columns], by lag."""
    out = ()
    for lag in tl.static_range(K):
        w = tl.load(weight_ptr + c * K + (K - 1 - lag), mask=c < C, other=0.0).to(tl.float32)
        out = out + ((w + 1.0 if lag == 0 else w) * unit,)
    return out


@triton.jit
def row(pointer, t, mask, c, C):
    """Columns c of row t in FP32, zeros outside of the mask."""
    return tl.load(pointer + t * C + c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def behind(xs, past, i: tl.constexpr, lag: tl.constexpr):
    """What a walk met `lag` before xs[i]; `past` is what it met before xs, the last first."""
    if i >= lag:
        return xs[i - lag]
    else:
        return past[lag - i - 1]


@triton.jit
def pushed(xs, past):
    """`past` behind xs."""
    out = ()
    for i in tl.static_range(len(past)):
        out = out + (behind(xs, past, len(xs), i + 1),)
    return out


@triton.jit
def _before(pointer, last, there, T, c, C, U: tl.constexpr):
    """U tokens from `last` backwards, as they are in memory; zeros if they are not `there`."""
    out = ()
    for i in tl.static_range(U):
        mask = there & (last - i < T) & (c < C)
        out = out + (tl.load(pointer + (last - i) * C + c, mask=mask, other=0.0),)
    return out


@triton.jit
def _floats(xs):
    out = ()
    for i in tl.static_range(len(xs)):
        out = out + (xs[i].to(tl.float32),)
    return out


@triton.jit
def onward(position, S):
    """The next token's place in its sequence."""
    return tl.where(position + 1 == S, 0, position + 1)


@triton.jit
def backward(position, S):
    """The last token's place in its sequence."""
    return tl.where(position == 0, S, position) - 1


@triton.jit(do_not_specialize=["T", "S"])
def conv_forward(
    x_ptr, weight_ptr, start_ptr, residual_ptr, y_ptr, T, S, unit, C: tl.constexpr, K: tl.constexpr,
    STARTS: tl.constexpr, RESIDUAL: tl.constexpr, EACH: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    taps = _taps(weight_ptr, c, C, K, unit)
    first = ((tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)) * EACH)[:, None]
    position = (first % S).to(tl.int32)
    past = ()
    for lag in tl.static_range(1, K):
        past = past + (row(x_ptr, first - lag, (first >= lag) & (first < T) & (c < C), c, C),)
    for step in range(0, EACH, U):
        xs = ()
        ys = ()
        for i in tl.static_range(U):
            t = first + step + i
            x = row(x_ptr, t, (t < T) & (c < C), c, C)
            xs = xs + (x,)
            y = x * taps[0]
            if RESIDUAL:
                y += row(residual_ptr, t, (t < T) & (c < C), c, C)
            ys = ys + (y,)
        for i in tl.static_range(U):
            t = first + step + i
            reach = position
            if STARTS:
                reach -= tl.maximum(tl.load(start_ptr + t, mask=t < T, other=0), 0)
            y = ys[i]
            for lag in tl.static_range(1, K):
                y += tl.where(reach >= lag, behind(xs, past, i, lag), 0.0) * taps[lag]
            tl.store(y_ptr + t * C + c, y.to(y_ptr.dtype.element_ty), mask=(t < T) & (c < C))
            position = onward(position, S)
        if K > 1:
            past = pushed(xs, past)


@triton.jit(do_not_specialize=["T", "S"])
def conv_backward(
    dy_ptr, x_ptr, weight_ptr, start_ptr, dx_ptr, dweight_ptr, dresidual_ptr, T, S, unit, C: tl.constexpr,
    K: tl.constexpr, STARTS: tl.constexpr, RESIDUAL: tl.constexpr, EACH: tl.constexpr, U: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Walks from the last token to the first. Partial sums of the gradient of the weight go to row
    program_id(0) of [programs, C, K]."""
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    taps = _taps(weight_ptr, c, C, K, unit)
    last = ((tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR) + 1) * EACH - 1)[:, None]
    position = (last % S).to(tl.int32)
    later = ()
    sums = (tl.zeros((BR, BC), tl.float32),)
    for lag in tl.static_range(1, K):
        later = later + (row(dy_ptr, last + lag, (last + lag < T) & (c < C), c, C),)
        sums = sums + (tl.zeros((BR, BC), tl.float32),)
    next_xs = _before(x_ptr, last, True, T, c, C, U)
    next_dys = _before(dy_ptr, last, True, T, c, C, U)
    for step in range(0, EACH, U):
        xs = _floats(next_xs)
        dys = _floats(next_dys)
        ahead = last - step - U
        there = step + U < EACH  # beyond its strip, the first program would read before the tensor
        next_xs = _before(x_ptr, ahead, there, T, c, C, U)
        next_dys = _before(dy_ptr, ahead, there, T, c, C, U)
        for i in tl.static_range(U):
            t = last - step - i
            here = (t < T) & (c < C)
            if RESIDUAL:
                tl.store(dresidual_ptr + t * C + c, dys[i].to(dresidual_ptr.dtype.element_ty), mask=here)
            dx = dys[i] * taps[0]
            more = (sums[0] + dys[i] * xs[i],)
            for lag in tl.static_range(1, K):
                sees = position + lag < S  # whether the token `lag` behind saw this one
                if STARTS:
                    start = tl.load(start_ptr + t + lag, mask=sees & (t < T), other=0)
                    sees = sees & (position >= start)
                d = tl.where(sees, behind(dys, later, i, lag), 0.0)
                dx += d * taps[lag]
                more = more + (sums[lag] + d * xs[i],)
            sums = more
            tl.store(dx_ptr + t * C + c, dx.to(dx_ptr.dtype.element_ty), mask=here)
            position = backward(position, S)
        if K > 1:
            later = pushed(dys, later)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    for lag in tl.static_range(K):
        part = (tl.program_id(0) * C + c) * K + (K - 1 - lag)
        tl.store(dweight_ptr + part, tl.sum(sums[lag], 0) * unit, mask=c < C)


def walks(tokens: int, most: int, strips: int = 1) -> tuple[int, int]:
    """(programs along the tokens, tokens of each of their `strips`)."""
    each = STRIDE * max(1, triton.cdiv(tokens, most * strips * STRIDE))
    return triton.cdiv(tokens, strips * each), each


class ShortConv(torch.autograd.Function):
    """x [B, S, C], weight [C, 1, K], starts [B, S] (see `Context`) or None, residual [B, S, C] or None ->
    [B, S, C] in `dtype`.

    `graph`, in that dtype, takes the gradient of the residual if it is given: that of the result as it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        starts: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        graph: Tensor | None,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        starts = None if starts is None else starts.contiguous()
        _, S, C = x.shape
        T, K = x.numel() // C, weight.shape[-1]
        y = empty_like(x, dtype)
        programs, each = walks(T, FORWARD_PARTS, STRIPS)
        if T:
            conv_forward[(programs, triton.cdiv(C, COLUMNS))](
                x, weight, starts, None if residual is None else residual.contiguous(), y, T, S,
                (K + 1) ** -0.5, C, K, starts is not None, residual is not None, each, STRIDE, STRIPS,
                COLUMNS, num_warps=STRIPS, enable_fp_fusion=True,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, starts)
        ctx.residual = None if residual is None or graph is not None else residual.dtype
        ctx.graph = graph is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, starts = ctx.saved_tensors
        dy = dy.contiguous()
        _, S, C = x.shape
        T, K = x.numel() // C, weight.shape[-1]
        dx = empty_like(x)
        dresidual = None
        if ctx.residual is not None:
            dresidual = dy if dy.dtype == ctx.residual else empty_like(x, ctx.residual)
        programs, each = walks(T, PARTS, STRIPS)
        sums = torch.empty(1, programs, *weight.shape, dtype=torch.float32, device=x.device)
        if T:
            conv_backward[(programs, triton.cdiv(C, COLUMNS))](
                dy, x, weight, starts, dx, sums, dresidual, T, S, (K + 1) ** -0.5, C, K,
                starts is not None, dresidual is not None and dresidual is not dy, each, STRIDE, STRIPS,
                COLUMNS, num_warps=STRIPS, enable_fp_fusion=True,
            )  # fmt: skip
        return dx, add(sums, weight.dtype)[0], None, dresidual, None, dy if ctx.graph else None
