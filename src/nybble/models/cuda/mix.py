"""Attention residuals and the norms behind them: n queries mix m finished blocks and the running one.

Legend: T tokens, H hidden, m sources: the finished blocks, then the running one, each RMS-normalised here.
    score[i, j] = <source_j, query_i> / sqrt(H)      weight[i] = softmax over j of score[i]
    y_i = norm_i(sum_j weight[i, j] source_j)        norm_i: RMS norm with a learned scale
The backward pass computes all of it again from the sources, each of which it reads once. All sums
over features that it needs follow from products of what it reads, so that these are added in one round.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.blocks import Term, gradient
from nybble.models.cuda.sums import add
from nybble.models.cuda.tiles import dense, empty_like, load_sum, parts, tile

FEW, MANY = 1584, 1056
"""Most warps that share out the sums over tokens, with two sources and with more, which take more registers:
as many as an H200 holds at once."""

STAGES = 3
"""Rows that a program has on their way or at hand: it computes one while the next comes."""


@triton.jit
def _sources(pointers, at, mask, H: tl.constexpr, eps):
    """The sources, normalised."""
    out = ()
    for j in tl.static_range(len(pointers)):
        x = tl.load(pointers[j] + at, mask=mask, other=0.0).to(tl.float32)
        out = out + (x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + eps),)
    return out


@triton.jit
def _softmax(scores):
    """Weights, each [rows, 1]."""
    largest = scores[0]
    for j in tl.static_range(1, len(scores)):
        largest = tl.maximum(largest, scores[j])
    total = tl.zeros_like(largest)
    raised = ()
    for j in tl.static_range(len(scores)):
        e = tl.exp(scores[j] - largest)
        raised = raised + (e,)
        total += e
    out = ()
    for j in tl.static_range(len(scores)):
        out = out + (raised[j] / total,)
    return out


@triton.jit
def _along(xs, y):
    """Products of each x with y, each [rows, 1]."""
    out = ()
    for j in tl.static_range(len(xs)):
        out = out + (tl.sum(xs[j] * y, 1, keep_dims=True),)
    return out


@triton.jit
def _times(values, factors):
    out = ()
    for j in tl.static_range(len(values)):
        out = out + (values[j] * factors[j],)
    return out


@triton.jit
def _mixed(sources, weights):
    """Sum of the sources times their weights."""
    out = sources[0] * weights[0]
    for j in tl.static_range(1, len(sources)):
        out += sources[j] * weights[j]
    return out


@triton.jit(do_not_specialize=["T"])
def mix_forward(
    source_ptrs, query_ptr, scale_ptrs, y_ptrs, T, root, eps, norm_eps,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    h = tl.arange(0, BH)[None, :]
    mask = (t < T)[:, None] & (h < H)
    at = t[:, None] * H + h
    sources = _sources(source_ptrs, at, mask, H, eps)
    for i in tl.static_range(len(y_ptrs)):
        query = tl.load(query_ptr + i * H + h, mask=h < H, other=0.0).to(tl.float32) * root
        out = _mixed(sources, _softmax(_along(sources, query)))
        rstd = tl.rsqrt(tl.sum(out * out, 1, keep_dims=True) / H + norm_eps)
        scale = tl.load(scale_ptrs[i] + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(y_ptrs[i] + at, (out * rstd * scale).to(y_ptrs[i].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def mix_backward(
    dy_ptrs, more_ptrs, source_ptrs, query_ptr, scale_ptrs, drunning_ptr, d_ptrs, share_ptr, dquery_ptr,
    dscale_ptr, T, root, eps, norm_eps,
    H: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """`dy_ptrs[i]` are the gradients at y_i, `more_ptrs` those at the running block from elsewhere. Partial
    sums of the queries' and the scales' gradients go to row program_id(0) of [programs, n, H]; what each
    finished block needs of each mixture to `d_ptrs` and to [n, blocks, 2, T], see `blocks`."""
    n: tl.constexpr = len(scale_ptrs)
    m: tl.constexpr = len(source_ptrs)
    h = tl.arange(0, BH)[None, :]
    dquery = ()
    dscale = ()
    for _ in tl.static_range(n):
        dquery = dquery + (tl.zeros((BT, BH), tl.float32),)
        dscale = dscale + (tl.zeros((BT, BH), tl.float32),)
    for step in tl.range(EACH, num_stages=STAGES):
        t = (tl.program_id(0).to(tl.int64) * EACH + step) * BT + tl.arange(0, BT)
        mask = (t < T)[:, None] & (h < H)
        at = t[:, None] * H + h
        # all that sums over features: squares and products of sources, queries and gradients
        xs = ()
        roots = ()
        for j in tl.static_range(m):
            x = tl.load(source_ptrs[j] + at, mask=mask, other=0.0).to(tl.float32)
            xs = xs + (x,)
            roots = roots + (tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + eps),)
        grams = ()  # grams[j][k]: source j times source k
        for j in tl.static_range(m):
            grams = grams + (_times(_times(_along(xs, xs[j]), roots), (roots[j],) * m),)
        drunning = tl.zeros((BT, BH), tl.float32)
        along = tl.zeros((BT, 1), tl.float32)
        dqueries = ()
        dscales = ()
        for i in tl.static_range(n):
            query = tl.load(query_ptr + i * H + h, mask=h < H, other=0.0).to(tl.float32) * root
            scale = tl.load(scale_ptrs[i] + h, mask=h < H, other=0.0).to(tl.float32)
            dy = load_sum(dy_ptrs[i], at, mask)
            g = dy * scale
            asked = _times(_along(xs, query), roots)
            pulled = _times(_along(xs, g), roots)
            weights = _softmax(asked)
            # out = sum of weights[j] source_j; unit is the reciprocal root of its mean square
            mixed = ()  # out times source j
            square = tl.zeros((BT, 1), tl.float32)
            pull = tl.zeros((BT, 1), tl.float32)
            for j in tl.static_range(m):
                o = tl.zeros((BT, 1), tl.float32)
                for k in tl.static_range(m):
                    o += weights[k] * grams[j][k]
                mixed = mixed + (o,)
                square += weights[j] * o
                pull += weights[j] * pulled[j]
            unit = tl.rsqrt(tl.maximum(square, 0.0) / H + norm_eps)
            back = unit * unit * unit * pull / H
            out = _mixed(xs, _times(weights, roots))
            dscales = dscales + (dscale[i] + dy * out * unit,)
            d = g * unit - out * back
            dweights = ()
            mean = tl.zeros((BT, 1), tl.float32)
            for j in tl.static_range(m):
                dw = pulled[j] * unit - mixed[j] * back
                dweights = dweights + (dw,)
                mean += dw * weights[j]
            dq = dquery[i]
            for j in tl.static_range(m):
                dscore = weights[j] * (dweights[j] - mean)
                dq += xs[j] * (dscore * roots[j])
                if j == m - 1:
                    drunning += d * weights[j] + query * dscore
                    along += weights[j] * dweights[j] + dscore * asked[j]
                else:
                    share = share_ptr + (i * (m - 1) + j) * 2 * T + t[:, None]
                    tl.store(share, weights[j], mask=(t < T)[:, None])
                    tl.store(share + T, dscore, mask=(t < T)[:, None])
            if m > 1:
                tl.store(d_ptrs[i] + at, d.to(d_ptrs[i].dtype.element_ty), mask=mask)
            dqueries = dqueries + (dq,)
        dquery = dqueries
        dscale = dscales
        x = xs[m - 1] * (along * roots[m - 1] / H)
        drunning = (drunning - x) * roots[m - 1] + load_sum(more_ptrs, at, mask)
        tl.store(drunning_ptr + at, drunning.to(drunning_ptr.dtype.element_ty), mask=mask)
    for i in tl.static_range(n):
        part = (tl.program_id(0) * n + i) * H + tl.arange(0, BH)
        inside = tl.arange(0, BH) < H
        tl.store(dquery_ptr + part, tl.sum(dquery[i], 0) * root, mask=inside)
        tl.store(dscale_ptr + part, tl.sum(dscale[i], 0), mask=inside)


class Mix(torch.autograd.Function):
    """Query [n, H], running block [..., H], n scales [H], m blocks [..., H] and their stand-ins -> the y_i,
    each as often as `copies` says, the running block and the stand-ins.

    The copies are one tensor: so many readers that their gradients are added in the backward pass here. For
    the same reason the running block and the stand-ins are handed on: who reads them later takes those. With
    `sum_dtype`, in place of the running block, a stand-in of that dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        norm_eps: float,
        copies: tuple[int, ...],
        dtype: torch.dtype,
        sum_dtype: torch.dtype | None,
        query: Tensor,
        running: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        n, H = len(copies), running.shape[-1]
        m = (len(rest) - n) // 2
        scales, blocks, stand_ins = rest[:n], rest[n : n + m], rest[n + m :]
        sources = tuple(x.contiguous() for x in (*blocks, running))
        query = query.contiguous()
        ys = tuple(empty_like(running, dtype) for _ in scales)
        T = running.numel() // H
        BT, BH, warps = tile(H)
        if T:
            mix_forward[(triton.cdiv(T, BT),)](
                sources,
                query,
                scales,
                ys,
                T,
                1.0 / math.sqrt(H),
                eps,
                norm_eps,
                H,
                BT,
                BH,
                num_warps=warps,
                enable_fp_fusion=True,
            )
        ctx.save_for_backward(query, *scales, *sources, *stand_ins)
        ctx.copies, ctx.eps, ctx.dtype = copies, (eps, norm_eps), dtype
        ctx.set_materialize_grads(False)
        out = [
            y if i == 0 else y.view_as(y) for y, count in zip(ys, copies, strict=True) for i in range(count)
        ]
        if sum_dtype is not None:
            running = running.new_zeros((), dtype=sum_dtype).expand(running.shape)
        return *out, running, *stand_ins

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        query, *tensors = ctx.saved_tensors
        n = len(ctx.copies)
        m = (len(tensors) - n) // 2
        scales, sources, stand_ins = tensors[:n], tensors[n : n + m + 1], tensors[n + m + 1 :]
        ends = [sum(ctx.copies[: i + 1]) for i in range(n)]
        dys = tuple(dense(gradients[end - count : end]) for end, count in zip(ends, ctx.copies, strict=True))
        more, *later = gradients[ends[-1] :]
        running = sources[-1]
        H = running.shape[-1]
        T, root = running.numel() // H, 1.0 / math.sqrt(H)
        drunning = empty_like(running)
        ds = tuple(empty_like(running, ctx.dtype) for _ in scales) if m else ()
        shares = torch.empty(n, m, 2, T, dtype=torch.float32, device=query.device)
        BT, BH, warps = tile(H)
        programs, each = parts(T, BT, warps, FEW if m < 2 else MANY)
        sums = torch.empty(2, programs, n, H, dtype=torch.float32, device=query.device)
        if T:
            mix_backward[(programs,)](
                dys, dense([more]), tuple(sources), query, tuple(scales), drunning, ds, shares, sums[0],
                sums[1], T, root, *ctx.eps, H, each, STAGES, BT, BH, num_warps=warps, enable_fp_fusion=True,
            )  # fmt: skip
        dquery, dscales = add(sums).unbind(0)
        if m:
            query = query.clone()  # FSDP frees a layer's weights before the blocks read their terms
        dblocks = [
            gradient(x, g, *(Term(ds[i], shares[i, j], query[i], root) for i in range(n)))
            for j, (x, g) in enumerate(zip(stand_ins, later, strict=True))
        ]
        return *(None,) * 5, dquery.view(query.shape), drunning, *dscales, *(None,) * m, *dblocks
