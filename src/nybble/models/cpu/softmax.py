"""Softmax of one chunk of attention with bias by distance, window, documents and sink; its derivative.

Legend: Q batches (a sequence and a key head), C queries of G heads each, K keys that end with the last
query's own. A row of the chunk is (query c, head g); its query is key number K - C + c.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, exp, floats, kernel, larger

Integers = NDArray[np.int64]
LOWEST = -86.0
"""Below this e^x is as good as zero."""


@kernel
def _forward(
    first: int,
    last: int,
    scores: Floats,
    bias: Floats,
    sink: Floats,
    sunk: Floats,
    documents: Integers,
    keys: Integers,
    window: int,
    G: int,
    scale: np.float32,
) -> None:
    _, rows, K = scores.shape
    n, packed = bias.shape[2], documents.shape[0] > 0
    for t in range(first, last):
        q, r = t // rows, t % rows
        own = K - rows // G + r // G
        begin, end = max(0, own - window + 1), own + 1
        near, shift = max(begin, end - n), n - end
        # slices, and loops from zero: an index that might be negative would keep loops from being vectorised
        row, by_distance = scores[q, r, begin:end], bias[q, r, near + shift :]
        size, far = end - begin, near - begin
        for j in range(size):
            row[j] *= scale
        close = row[far:]
        for j in range(end - near):
            close[j] += by_distance[j]
        if packed:
            b = q // (scores.shape[0] // documents.shape[0])
            for j in range(size):
                if keys[b, begin + j] != documents[b, r // G]:
                    row[j] = -np.inf
        highest = sink[q, r]
        for j in range(size):
            highest = larger(row[j], highest)
        total = np.float32(0.0)
        for j in range(size):
            x = row[j] - highest
            e = exp(np.float32(LOWEST) if x < np.float32(LOWEST) else x)
            e = np.float32(0.0) if x < np.float32(LOWEST) else e
            row[j] = e
            total += e
        lost = np.exp(sink[q, r] - highest)
        share = np.float32(1.0) / (total + lost)
        sunk[q, r] = lost * share
        for j in range(size):
            row[j] *= share
        scores[q, r, :begin] = 0.0
        scores[q, r, end:] = 0.0


@kernel
def _backward(
    first: int,
    last: int,
    p: Floats,
    sunk: Floats,
    d: Floats,
    dbias: Floats,
    dsink: Floats,
    window: int,
    G: int,
    scale: np.float32,
) -> None:
    _, rows, K = p.shape
    n = dbias.shape[2]
    for t in range(first, last):
        q, r = t // rows, t % rows
        own = K - rows // G + r // G
        begin, end = max(0, own - window + 1), own + 1
        near, shift = max(begin, end - n), n - end
        mass, grad = p[q, r, begin:end], d[q, r, begin:end]
        size, far = end - begin, near - begin
        mean = np.float32(0.0)
        for j in range(size):
            mean += mass[j] * grad[j]
        dsink[q, r] = -sunk[q, r] * mean
        for j in range(size):
            grad[j] = mass[j] * (grad[j] - mean)
        dbias[q, r, : near + shift] = 0.0
        by_distance, close = dbias[q, r, near + shift :], grad[far:]
        for j in range(end - near):
            by_distance[j] = close[j]
        for j in range(size):
            grad[j] *= scale
        d[q, r, :begin] = 0.0
        d[q, r, end:] = 0.0


def forward(
    scores: Tensor,
    bias: Tensor,
    sink: Tensor,
    documents: tuple[Tensor, Tensor] | None,
    window: int,
    G: int,
    scale: float,
) -> Tensor:
    """Turn scores [Q, C * G, K], before their scale, into probabilities; returns the sink's [Q, C * G].

    Args:
        scores: overwritten.
        bias: [Q, C * G, n], of the n nearest distances, the farthest first.
        sink: [Q, C * G].
        documents: int64 [B, C] of the queries and [B, K] of the keys, or None.
        window: how many keys a query reaches, its own included.
        G: heads of a query.
        scale: of the scores.
    """
    sunk = torch.empty_like(sink)
    if documents is None:
        none = np.empty((0, 0), dtype=np.int64)
        labels = none, none
    else:
        labels = documents[0].long().contiguous().numpy(), documents[1].long().contiguous().numpy()
    arrays = [floats(x) for x in (scores, bias, sink, sunk)]
    split(_forward, sink.numel(), 16 * scores.numel(), *arrays, *labels, window, G, np.float32(scale))
    return sunk


def backward(
    p: Tensor, sunk: Tensor, d: Tensor, n: int, window: int, G: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Turn d, the gradient of p [Q, C * G, K], into that of the scores before their scale.

    Returns:
        The gradients of bias [Q, C * G, n] and of sink [Q, C * G].
    """
    dbias, dsink = p.new_empty(*p.shape[:2], n), torch.empty_like(sunk)
    arrays = [floats(x) for x in (p, sunk, d, dbias, dsink)]
    split(_backward, sunk.numel(), 8 * p.numel(), *arrays, window, G, np.float32(scale))
    return dbias, dsink
