"""Causal attention with a learned bias per query and distance, a sink per query and perhaps a window.

    score[i, j] = scale * q_i . k_j + bias[i, i - j]       for 0 <= i - j < window
    bias[i, d] = rel_i . proj[:, d]                        for d < extent, else 0
    out_i = sum_j exp(score[i, j]) v_j / (sum_j exp(score[i, j]) + exp(sink_i))

`attend_chunks` walks over chunks of queries and computes scores again in the backward pass: nothing of size
S x S is ever kept. Each chunk's bias comes from one small GEMM over distances; a view whose rows slide by
one element turns distances into key positions without a gather, and the mask is a slice of that GEMM's
buffer. `flex.py` computes the same on GPUs.

Shapes: q [B, S, H, D]; k, v [B, T, h, D] with h key heads, H a multiple of h and T >= S (the last S keys are
the queries' own tokens); rel [B, S, H, R]; proj [R, extent]; sink [B, S, H]; result [B, S, H, D].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Scores of one chunk (1 MiB in FP32): few enough for a core's cache, enough to pay for the calls."""

SMALLEST_CHUNK = 64


@dataclass(frozen=True)
class _Shape:
    """Sizes of one call: Q = B * h batches, each with rows (token, query head of the group)."""

    B: int
    S: int
    T: int
    h: int
    G: int
    D: int
    window: int
    scale: float

    def chunks(self) -> list[tuple[int, int, int, int]]:
        """(first query, end query, first key, end key) of each chunk."""
        past = self.T - self.S
        size = min(self.S, max(SMALLEST_CHUNK, self.window // 2))
        while (
            size > SMALLEST_CHUNK
            and self.B * self.h * self.G * size * min(self.T, self.window + size) > CHUNK_ELEMENTS
        ):
            size = (size + 1) // 2
        return [
            (start, end := min(start + size, self.S), max(0, past + start - self.window + 1), past + end)
            for start in range(0, self.S, size)
        ]


def _rows(x: Tensor, h: int) -> Tensor:
    """[B, S, h * G, D] -> [B * h, S * G, D]."""
    B, S, H, D = x.shape
    return x.reshape(B, S, h, H // h, D).transpose(1, 2).reshape(B * h, S * (H // h), D)


def _unrows(x: Tensor, shape: _Shape) -> Tensor:
    """[B * h, S * G, D] -> [B, S, h * G, D]."""
    B, S, h, G = shape.B, shape.S, shape.h, shape.G
    # contiguous, as the fake kernels promise
    return x.view(B, h, S, G, -1).transpose(1, 2).contiguous().view(B, S, h * G, -1)


def _slide(bias: Tensor, C: int, G: int, K: int) -> Tensor:
    """View [Q, C * G, C + K - 1] over distances (column m is K - 1 - m) as [Q, C, G, K] over keys."""
    Q, _, L = bias.shape
    return bias.as_strided((Q, C, G, K), (C * G * L, G * L - 1, L, 1), bias.storage_offset() + C - 1)


def _with_sink(x: Tensor, lo: int, hi: int) -> Tensor:
    """Keys or values lo..hi and a zero row for the sink: [Q, K + 1, D], contiguous for batched GEMMs."""
    out = x.new_empty(x.shape[0], hi - lo + 1, x.shape[2])
    out[:, :-1] = x[:, lo:hi]
    out[:, -1] = 0.0
    return out


def _probabilities(
    q: Tensor, k: Tensor, rel: Tensor, proj: Tensor, sink: Tensor, blocked: Tensor | None, shape: _Shape
) -> Tensor:
    """Softmax of one chunk [Q, C * G, K + 1], the sink last; k has its zero row, proj falls in distance."""
    Q, rows, G, K = q.shape[0], q.shape[1], shape.G, k.shape[1] - 1
    C, extent = rows // G, proj.shape[1]
    L, n = C + K - 1, min(extent, K)
    bias = q.new_empty(Q, rows, L)
    bias[:, :, K:] = -torch.inf  # keys after the query
    if n < K:
        bias[:, :, : K - n] = 0.0
    torch.mm(rel.reshape(Q * rows, -1), proj[:, extent - n :], out=bias.view(Q * rows, L)[:, K - n : K])
    if shape.window < K:
        bias[:, :, : K - shape.window] = -torch.inf
    scores = q.new_empty(Q, rows, K + 1)
    scores[:, :, :K].view(Q, C, G, K).copy_(_slide(bias, C, G, K))
    scores[:, :, K] = sink
    if blocked is not None:
        scores[:, :, :K].view(shape.B, shape.h, C, G, K).masked_fill_(
            blocked[:, None, :, None, :], -torch.inf
        )
    scores.baddbmm_(q, k.transpose(1, 2), alpha=shape.scale)
    return torch.softmax(scores, -1, out=scores)


def _blocked(
    queries: Tensor | None, keys: Tensor | None, c0: int, c1: int, lo: int, hi: int
) -> Tensor | None:
    """[B, C, K], true where query and key are of different documents."""
    if queries is None or keys is None:
        return None
    return queries[:, c0:c1, None] != keys[:, None, lo:hi]


def _shape(q: Tensor, k: Tensor, window: int | None, scale: float) -> _Shape:
    B, S, H, D = q.shape
    T, h = k.shape[1], k.shape[2]
    return _Shape(B, S, T, h, H // h, D, T if window is None else min(window, T), scale)


@torch.library.custom_op("nybble::relative_attention", mutates_args=())
def _forward(
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
    if q.numel() == 0:
        return torch.empty_like(q)
    shape = _shape(q, k, window, scale)
    h, G = shape.h, shape.G
    qr, kr, vr, rr, sr = (
        _rows(q, h),
        _rows(k, h),
        _rows(v, h),
        _rows(rel, h),
        _rows(sink[..., None], h)[..., 0],
    )
    flipped = proj.flip(1)
    out = torch.empty_like(qr)
    for c0, c1, lo, hi in shape.chunks():
        rows = slice(c0 * G, c1 * G)
        blocked = _blocked(queries, keys, c0, c1, lo, hi)
        p = _probabilities(
            qr[:, rows].contiguous(),
            _with_sink(kr, lo, hi),
            rr[:, rows],
            flipped,
            sr[:, rows],
            blocked,
            shape,
        )
        out[:, rows] = torch.bmm(p, _with_sink(vr, lo, hi))
    return _unrows(out, shape)


@torch.library.custom_op("nybble::relative_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if q.numel() == 0:
        return tuple(x.new_zeros(x.shape) for x in (q, k, v, rel, proj, sink))  # type: ignore[return-value]
    shape = _shape(q, k, window, scale)
    h, G, extent = shape.h, shape.G, proj.shape[1]
    qr, kr, vr, rr, sr = (
        _rows(q, h),
        _rows(k, h),
        _rows(v, h),
        _rows(rel, h),
        _rows(sink[..., None], h)[..., 0],
    )
    dr = _rows(dout, h)
    flipped = proj.flip(1)
    dq, drel, dsink = (torch.empty_like(x) for x in (qr, rr, sr))
    dk, dv, dproj = (torch.zeros_like(x) for x in (kr, vr, flipped))
    Q, buffer = qr.shape[0], qr.new_empty(0)
    for c0, c1, lo, hi in shape.chunks():
        rows, C, K = slice(c0 * G, c1 * G), c1 - c0, hi - lo
        blocked = _blocked(queries, keys, c0, c1, lo, hi)
        qc, dc, kc = qr[:, rows].contiguous(), dr[:, rows].contiguous(), _with_sink(kr, lo, hi)
        p = _probabilities(qc, kc, rr[:, rows], flipped, sr[:, rows], blocked, shape)
        dv[:, lo:hi] += torch.bmm(p.transpose(1, 2), dc)[:, :-1]
        dp = torch.bmm(dc, _with_sink(vr, lo, hi).transpose(1, 2))
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dsink[:, rows] = ds[:, :, -1]
        dq[:, rows] = torch.bmm(ds, kc)
        dk[:, lo:hi] += torch.bmm(ds.transpose(1, 2), qc)[:, :-1]
        # back from key positions to distances
        L, n = C + K - 1, min(extent, K)
        if buffer.shape != (
            Q,
            C * G,
            L,
        ):  # chunks of one shape write the same places, so that zeros stay zeros
            buffer = qr.new_zeros(Q, C * G, L)
        _slide(buffer, C, G, K).copy_(ds[:, :, :-1].view(Q, C, G, K))
        dbias = buffer.view(Q * C * G, L)[:, K - n : K]
        near = rr[:, rows].reshape(Q * C * G, -1)
        drel[:, rows] = (dbias @ flipped[:, extent - n :].T).view(Q, C * G, -1)
        dproj[:, extent - n :].addmm_(near.T, dbias)
    dq.mul_(scale)
    dk.mul_(scale)
    keyed = _Shape(shape.B, shape.T, shape.T, h, 1, shape.D, shape.window, scale)
    return (
        _unrows(dq, shape),
        _unrows(dk, keyed),
        _unrows(dv, keyed),
        _unrows(drel, shape),
        dproj.flip(1),
        _unrows(dsink[..., None], shape)[..., 0],
    )


@_forward.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@_backward.register_fake
def _(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, rel: Tensor, proj: Tensor, sink: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, rel, proj, sink))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(dout.contiguous(), *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*grads, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_setup)


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    *,
    window: int | None,
    scale: float,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> Tensor:
    """The formula above in FP32 on any device; different segments ([B, S] and [B, T]) do not meet."""
    dtype = q.dtype
    q, k, v, rel, proj, sink = (x.float() for x in (q, k, v, rel, proj, sink))
    return _forward(q, k, v, rel, proj, sink, query_segments, key_segments, window, scale).to(dtype)
