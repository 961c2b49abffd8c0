"""Attention residuals and the norms behind them: n queries mix m finished blocks and the running one.

Legend: T tokens, H hidden, s sources: m normalised blocks, then the running block, normalised here.
    score[i, j] = <source_j, query_i> / sqrt(H)      weight[i] = softmax over j of score[i]
    y_i = norm_i(sum_j weight[i, j] source_j)        norm_i: RMS norm with a learned scale
The backward pass computes all of it again from the sources; it reads and writes each of them once.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.tiles import dense, empty_like, load_sum, parts, tile


@triton.jit
def _sources(pointers, at, mask, H: tl.constexpr, eps):
    """(the sources, normalised; the reciprocal root of the running one [rows, 1])."""
    out = ()
    rstd = 0.0
    for j in tl.static_range(len(pointers)):
        x = tl.load(pointers[j] + at, mask=mask, other=0.0).to(tl.float32)
        if j == len(pointers) - 1:
            rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + eps)
            x = x * rstd
        out = out + (x,)
    return out, rstd


@triton.jit
def _weights(sources, query):
    """Softmax over sources of their products with `query` [1, H], each [rows, 1]."""
    scores = ()
    largest = tl.sum(sources[0] * query, 1, keep_dims=True)
    scores = scores + (largest,)
    for j in tl.static_range(1, len(sources)):
        score = tl.sum(sources[j] * query, 1, keep_dims=True)
        scores = scores + (score,)
        largest = tl.maximum(largest, score)
    total = tl.zeros_like(largest)
    raised = ()
    for j in tl.static_range(len(sources)):
        e = tl.exp(scores[j] - largest)
        raised = raised + (e,)
        total += e
    out = ()
    for j in tl.static_range(len(sources)):
        out = out + (raised[j] / total,)
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
    sources, _ = _sources(source_ptrs, at, mask, H, eps)
    for i in tl.static_range(len(y_ptrs)):
        query = tl.load(query_ptr + i * H + h, mask=h < H, other=0.0).to(tl.float32) * root
        out = _mixed(sources, _weights(sources, query))
        rstd = tl.rsqrt(tl.sum(out * out, 1, keep_dims=True) / H + norm_eps)
        scale = tl.load(scale_ptrs[i] + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(y_ptrs[i] + at, (out * rstd * scale).to(y_ptrs[i].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def mix_backward(
    dy_ptrs, more_ptrs, source_ptrs, query_ptr, scale_ptrs, dsource_ptrs, dquery_ptr, dscale_ptr,
    T, root, eps, norm_eps,
    H: tl.constexpr, EACH: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """`dy_ptrs[i]` are the gradients at y_i, `more_ptrs[j]` those at source j from elsewhere. Partial sums of
    the queries' and the scales' gradients go to row program_id(0) of [programs, n, H]."""
    n: tl.constexpr = len(scale_ptrs)
    m: tl.constexpr = len(source_ptrs)
    h = tl.arange(0, BH)[None, :]
    dquery = ()
    dscale = ()
    for _ in tl.static_range(n):
        dquery = dquery + (tl.zeros((BT, BH), tl.float32),)
        dscale = dscale + (tl.zeros((BT, BH), tl.float32),)
    for step in range(EACH):
        t = (tl.program_id(0).to(tl.int64) * EACH + step) * BT + tl.arange(0, BT)
        mask = (t < T)[:, None] & (h < H)
        at = t[:, None] * H + h
        sources, rstd = _sources(source_ptrs, at, mask, H, eps)
        dsources = ()
        for j in tl.static_range(m - 1):
            dsources = dsources + (load_sum(more_ptrs[j], at, mask),)
        dsources = dsources + (tl.zeros((BT, BH), tl.float32),)
        dqueries = ()
        dscales = ()
        for i in tl.static_range(n):
            query = tl.load(query_ptr + i * H + h, mask=h < H, other=0.0).to(tl.float32) * root
            weights = _weights(sources, query)
            out = _mixed(sources, weights)
            unit = tl.rsqrt(tl.sum(out * out, 1, keep_dims=True) / H + norm_eps)
            out = out * unit
            d = load_sum(dy_ptrs[i], at, mask)
            dscales = dscales + (dscale[i] + d * out,)
            d = d * tl.load(scale_ptrs[i] + h, mask=h < H, other=0.0).to(tl.float32)
            d = (d - out * (tl.sum(d * out, 1, keep_dims=True) / H)) * unit
            dweights = ()
            mean = tl.zeros_like(unit)
            for j in tl.static_range(m):
                dw = tl.sum(d * sources[j], 1, keep_dims=True)
                dweights = dweights + (dw,)
                mean += dw * weights[j]
            added = ()
            dq = dquery[i]
            for j in tl.static_range(m):
                dscore = weights[j] * (dweights[j] - mean)
                dq += dscore * sources[j]
                added = added + (dsources[j] + d * weights[j] + dscore * query,)
            dsources = added
            dqueries = dqueries + (dq,)
        dquery = dqueries
        dscale = dscales
        for j in tl.static_range(m):
            d = dsources[j]
            if j == m - 1:
                x = sources[j]
                d = (d - x * (tl.sum(d * x, 1, keep_dims=True) / H)) * rstd
                d += load_sum(more_ptrs[j], at, mask)
            tl.store(dsource_ptrs[j] + at, d.to(dsource_ptrs[j].dtype.element_ty), mask=mask)
    for i in tl.static_range(n):
        part = (tl.program_id(0) * n + i) * H + tl.arange(0, BH)
        inside = tl.arange(0, BH) < H
        tl.store(dquery_ptr + part, tl.sum(dquery[i], 0) * root, mask=inside)
        tl.store(dscale_ptr + part, tl.sum(dscale[i], 0), mask=inside)


class Mix(torch.autograd.Function):
    """Query [n, H], running block [..., H], n scales [H] and m blocks [..., H] -> the y_i, each as often as
    `copies` says, the running block and the blocks.

    The copies are one tensor: so many readers that their gradients are added in the backward pass here. For
    the same reason the running block and the blocks are handed on: who reads them later takes those.
    """

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        norm_eps: float,
        copies: tuple[int, ...],
        dtype: torch.dtype,
        query: Tensor,
        running: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        n, H = len(copies), running.shape[-1]
        scales, blocks = rest[:n], rest[n:]
        sources = tuple(x.contiguous() for x in (*blocks, running))
        query = query.contiguous()
        ys = tuple(empty_like(running, dtype) for _ in scales)
        T = running.numel() // H
        BT, BH, warps = tile(H)
        if T:
            mix_forward[(triton.cdiv(T, BT),)](
                sources, query, scales, ys, T, 1.0 / math.sqrt(H), eps, norm_eps, H, BT, BH, num_warps=warps
            )
        ctx.save_for_backward(query, *scales, *sources)
        ctx.copies, ctx.eps = copies, (eps, norm_eps)
        ctx.set_materialize_grads(False)
        out = [
            y if i == 0 else y.view_as(y) for y, count in zip(ys, copies, strict=True) for i in range(count)
        ]
        return *out, running, *blocks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        query, *tensors = ctx.saved_tensors
        n = len(ctx.copies)
        scales, sources = tuple(tensors[:n]), tuple(tensors[n:])
        ends = [sum(ctx.copies[: i + 1]) for i in range(n)]
        dys = tuple(dense(gradients[end - count : end]) for end, count in zip(ends, ctx.copies, strict=True))
        drunning, *dblocks = gradients[ends[-1] :]
        more = tuple(dense([g]) for g in (*dblocks, drunning))
        H = sources[-1].shape[-1]
        T = sources[-1].numel() // H
        dsources = tuple(empty_like(x) for x in sources)
        BT, BH, warps = tile(H)
        warps *= 1 if n == 1 else 2  # sums of n queries and scales take many registers
        programs, each = parts(T, BT, warps)
        sums = torch.empty(2, programs, n, H, dtype=torch.float32, device=query.device)
        if T:
            mix_backward[(programs,)](
                dys, more, sources, query, scales, dsources, sums[0], sums[1],
                T, 1.0 / math.sqrt(H), *ctx.eps, H, each, BT, BH, num_warps=warps,
            )  # fmt: skip
        dquery, dscales = sums.sum(1).unbind(0)
        return None, None, None, None, dquery.view(query.shape), dsources[-1], *dscales, *dsources[:-1]
