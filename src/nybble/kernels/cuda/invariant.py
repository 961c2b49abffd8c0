"""Products and attention on GPUs whose bits depend on a row alone: one tile size, one order, no split of K.

A library picks its tile, and whether to split the sum over K among blocks, by the shape of the whole product.
These kernels always use the same tile and go through K from the first block to the last, so a row gets the
same bits whatever rows are around it. They are for the batch-invariant mode (`models.invariant`), not for
speed. Legend: M rows, K inputs, N outputs, E experts; B sequences, S queries, T keys, H heads, D head size.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.kernels.cuda.jit import cdiv

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 64
BLOCK_KEYS = 32


@triton.jit
def _tile(
    a, b, rows, row_mask, columns, N, am, ak, bk, bn,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum over K of a tile, in FP32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(
            a + rows[:, None] * am + k[None, :] * ak, mask=row_mask[:, None] & (k < K)[None, :], other=0.0
        )
        y = tl.load(
            b + k[:, None] * bk + columns[None, :] * bn,
            mask=(k < K)[:, None] & (columns < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _matmul(
    a, b, out, M, N, am, ak, bk, bn,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    acc = _tile(a, b, rows, rows < M, columns, N, am, ak, bk, bn, K, BM, BN, BK)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped(
    a, b, offs, out, N, am, ak, be, bk, bn,
    E: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tile number program_id(0) among those of all experts; an expert's tiles begin with its first row."""
    tile = tl.program_id(0)
    expert, first, last, before, start = -1, 0, 0, 0, 0
    for e in range(E):
        end = tl.load(offs + e)
        tiles = (end - start + BM - 1) // BM
        here = (tile >= before) & (tile < before + tiles)
        expert = tl.where(here, e, expert)
        first = tl.where(here, start + (tile - before) * BM, first)
        last = tl.where(here, end, last)
        before += tiles
        start = end
    if expert >= 0:
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
        w = b + expert.to(tl.int64) * be
        acc = _tile(a, w, rows, rows < last, columns, N, am, ak, bk, bn, K, BM, BN, BK)
        mask = (rows < last)[:, None] & (columns < N)[None, :]
        tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scores(
    q, k, rel, proj, at, own, features, feature_mask, weights, weight_mask, kt, extent, scale,
):  # fmt: skip
    """Scores of keys `at` [BK], each sum over features in one tree."""
    reach = at <= own
    key = tl.load(
        k + at[:, None] * kt + features[None, :], mask=reach[:, None] & feature_mask[None, :], other=0.0
    )
    score = tl.sum(key * q[None, :], 1) * scale
    distance = own - at
    near = reach & (distance < extent)
    profile = tl.load(
        proj + weights[None, :] * extent + distance[:, None],
        mask=near[:, None] & weight_mask[None, :],
        other=0.0,
    )
    return tl.where(reach, score + tl.sum(profile * rel[None, :], 1), float("-inf"))


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, rel_ptr, proj, sink_ptr, first_ptr, out,
    S, T, H, G, D, R, extent, kb, kt, kh, scale,
    BD: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One query and head: its keys from the first that it reaches, a block at a time, twice."""
    item = tl.program_id(0).to(tl.int64)
    head = item % H
    s = item // H % S
    b = item // (H * S)
    features, weights = tl.arange(0, BD), tl.arange(0, BR)
    feature_mask, weight_mask = features < D, weights < R
    q = tl.load(q_ptr + item * D + features, mask=feature_mask, other=0.0)
    rel = tl.load(rel_ptr + item * R + weights, mask=weight_mask, other=0.0)
    sink = tl.load(sink_ptr + item)
    own = T - S + s
    begin = tl.load(first_ptr + b * S + s)
    k = k_ptr + b * kb + (head // G) * kh
    v = v_ptr + b * kb + (head // G) * kh
    highest = sink
    start = begin
    while start <= own:
        at = start + tl.arange(0, BK)
        score = _scores(
            q, k, rel, proj, at, own, features, feature_mask, weights, weight_mask, kt, extent, scale
        )
        highest = tl.maximum(highest, tl.max(score, 0))
        start += BK
    total = tl.exp(sink - highest)
    acc = tl.zeros((BD,), tl.float32)
    start = begin
    while start <= own:
        at = start + tl.arange(0, BK)
        score = _scores(
            q, k, rel, proj, at, own, features, feature_mask, weights, weight_mask, kt, extent, scale
        )
        p = tl.exp(score - highest)
        value = tl.load(
            v + at[:, None] * kt + features[None, :],
            mask=(at <= own)[:, None] & feature_mask[None, :],
            other=0.0,
        )
        total += tl.sum(p, 0)
        acc += tl.sum(p[:, None] * value, 0)
        start += BK
    tl.store(out + item * D + features, acc / total, mask=feature_mask)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [K, N] in `dtype`, added over K in FP32 and in one order."""
    b = b.to(a.dtype)
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=dtype, device=a.device)
    if out.numel():
        grid = (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))
        _matmul[grid](
            a, b, out, M, N, *a.stride(), *b.stride(), K, BLOCK_M, BLOCK_N, BLOCK_K, enable_fp_fusion=True
        )
    return out


def grouped_matmul(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows of a [M, K], which end at offs [E], times its w [E, K, N]; zeros beyond."""
    (M, K), (E, _, N) = a.shape, w.shape
    out = torch.zeros(M, N, dtype=a.dtype, device=a.device)
    if out.numel():
        grid = (cdiv(M, BLOCK_M) + E, cdiv(N, BLOCK_N))
        _grouped[grid](
            a,
            w,
            offs,
            out,
            N,
            *a.stride(),
            *w.stride(),
            E,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            enable_fp_fusion=True,
        )
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """The attention of `models.inkling2.attend`, with the same arguments, for documents that are runs."""
    q, k, v, rel, proj, sink = (x.contiguous() for x in (q, k, v, rel, proj, sink))
    B, S, H, D = q.shape
    T, h, R = k.shape[1], k.shape[2], rel.shape[3]
    first = first_keys(B, S, T, keys if queries is not None else None, window, q.device)
    out = torch.empty_like(q)
    if q.numel():
        block = (triton.next_power_of_2(D), triton.next_power_of_2(R), BLOCK_KEYS)
        sizes = (S, T, H, H // h, D, R, proj.shape[1], T * h * D, h * D, D, scale)
        _attend[(B * S * H,)](q, k, v, rel, proj, sink, first, out, *sizes, *block, enable_fp_fusion=True)
    return out


def first_keys(
    B: int, S: int, T: int, keys: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """int64 [B, S], first key of each query, by its document, a run of `keys` [B, T], or window."""
    own = torch.arange(T - S, T, device=device).expand(B, S)
    first = torch.zeros_like(own) if window is None else (own - (window - 1)).clamp(min=0)
    if keys is None:
        return first.contiguous()
    index = torch.arange(T, device=device).expand(B, T)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(keys[:, 1:] != keys[:, :-1], index[:, 1:], 0)
    return torch.maximum(first, starts.cummax(dim=1).values[:, T - S :]).contiguous()
