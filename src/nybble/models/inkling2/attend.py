"""Causal attention with a learned bias per query and distance, a sink per query and perhaps a window.

    score[i, j] = scale * q_i . k_j + bias[i, i - j]       for 0 <= i - j < window
    bias[i, d] = rel_i . proj[:, d]                        for d < extent, else 0
    out_i = sum_j exp(score[i, j]) v_j / (sum_j exp(score[i, j]) + exp(sink_i))

`attend_chunks` walks over chunks of queries and computes scores again in the backward pass: nothing of size
S x S is ever kept. Each chunk's bias comes from one small GEMM over distances, and is added where the
softmax reads the scores. On GPUs `fused.py` computes the same, or `flex.py` what it does not serve.

Shapes: q [B, S, H, D]; k, v [B, T, h, D] with h key heads, H a multiple of h and T >= S (the last S keys are
the queries' own tokens); rel [B, S, H, R]; proj [R, extent]; sink [B, S, H]; result [B, S, H, D].
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nybble.models.cpu import softmax
from nybble.models.inkling2 import chunk

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


@dataclass
class _Inputs:
    """The tensors of one call by rows, and what its chunks are made of."""

    shape: _Shape
    q: Tensor
    k: Tensor
    v: Tensor
    rel: Tensor
    sink: Tensor
    bank: Tensor
    """proj [R, extent], the farthest distance first."""
    documents: tuple[Tensor, Tensor] | None

    def probabilities(self, c0: int, c1: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Softmax of a chunk [Q, C * G, K], and the sink's share [Q, C * G]."""
        shape = self.shape
        part = slice(c0 * shape.G, c1 * shape.G)
        rel, n = self.rel[:, part], self.near(hi - lo)
        scores = torch.bmm(self.q[:, part], self.k[:, lo:hi].transpose(1, 2))
        bias = (rel.reshape(-1, rel.shape[-1]) @ self.bank[:, self.bank.shape[1] - n :]).view(
            *rel.shape[:2], n
        )
        documents = None
        if self.documents is not None:
            documents = self.documents[0][:, c0:c1], self.documents[1][:, lo:hi]
        sink = self.sink[:, part].contiguous()
        sunk = self.softmax.forward(scores, bias, sink, documents, shape.window, shape.G, shape.scale)
        return scores, sunk

    def near(self, K: int) -> int:
        """How many distances have a bias when there are K keys."""
        return min(self.bank.shape[1], K)

    @property
    def softmax(self) -> Any:
        """The module that computes it on this device."""
        return softmax if self.q.device.type == "cpu" else chunk


def _inputs(
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
) -> _Inputs:
    shape = _shape(q, k, window, scale)
    q, k, v, rel, sinks = (_rows(x, shape.h) for x in (q, k, v, rel, sink[..., None]))
    documents = None if queries is None or keys is None else (queries, keys)
    return _Inputs(shape, q, k, v, rel, sinks[..., 0], proj.flip(1), documents)


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
    x = _inputs(q, k, v, rel, proj, sink, queries, keys, window, scale)
    out = torch.empty_like(x.q)
    for c0, c1, lo, hi in x.shape.chunks():
        p, _ = x.probabilities(c0, c1, lo, hi)
        out[:, c0 * x.shape.G : c1 * x.shape.G] = torch.bmm(p, x.v[:, lo:hi])
    return _unrows(out, x.shape)


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
    x = _inputs(q, k, v, rel, proj, sink, queries, keys, window, scale)
    shape, G, extent = x.shape, x.shape.G, proj.shape[1]
    dout = _rows(dout, shape.h)
    dq, drel, dsink = (torch.empty_like(t) for t in (x.q, x.rel, x.sink))
    dk, dv, dbank = (torch.zeros_like(t) for t in (x.k, x.v, x.bank))
    for c0, c1, lo, hi in shape.chunks():
        part, n = slice(c0 * G, c1 * G), x.near(hi - lo)
        p, sunk = x.probabilities(c0, c1, lo, hi)
        dv[:, lo:hi] += torch.bmm(p.transpose(1, 2), dout[:, part])
        d = torch.bmm(dout[:, part], x.v[:, lo:hi].transpose(1, 2))
        dbias, dsink[:, part] = x.softmax.backward(p, sunk, d, n, shape.window, G, scale)
        dq[:, part] = torch.bmm(d, x.k[:, lo:hi])
        dk[:, lo:hi] += torch.bmm(d.transpose(1, 2), x.q[:, part])
        dbias, near = dbias.view(-1, n), x.rel[:, part]
        drel[:, part] = (dbias @ x.bank[:, extent - n :].T).view(near.shape)
        dbank[:, extent - n :].addmm_(near.reshape(-1, near.shape[-1]).T, dbias)
    keyed = replace(shape, S=shape.T, G=1)
    return (
        _unrows(dq, shape),
        _unrows(dk, keyed),
        _unrows(dv, keyed),
        _unrows(drel, shape),
        dbank.flip(1),
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
