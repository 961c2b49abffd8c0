"""Attention residuals: n queries mix m finished blocks [m, T, H] and the normalised running one [T, H]."""

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel

BLOCK_ROWS = 64


@kernel
def _forward(
    first: int,
    last: int,
    q: Floats,
    partial: Floats,
    blocks: Floats,
    eps: np.float32,
    outs: Floats,
    weights: Floats,
    scores: Floats,
    rstd: Floats,
) -> None:
    n, H = q.shape
    m = blocks.shape[0]
    for t in range(first, last):
        now = partial[t]
        total = np.float32(0.0)
        for c in range(H):
            total += now[c] * now[c]
        unit = np.float32(1.0) / np.sqrt(total / np.float32(H) + eps)
        rstd[t] = unit
        for i in range(n):
            query, w, out = q[i], weights[t, i], outs[i, t]
            largest = np.float32(-np.inf)
            for j in range(m + 1):
                source = now if j == m else blocks[j, t]
                score = np.float32(0.0)
                for c in range(H):
                    score += source[c] * query[c]
                if j == m:
                    score *= unit
                    scores[t, i] = score
                w[j] = score
                largest = score if score > largest else largest
            mass = np.float32(0.0)
            for j in range(m + 1):
                w[j] = np.exp(w[j] - largest)
                mass += w[j]
            for j in range(m + 1):
                w[j] /= mass
            last_weight = w[m] * unit
            for c in range(H):
                out[c] = now[c] * last_weight
            for j in range(m):
                source, weight = blocks[j, t], w[j]
                for c in range(H):
                    out[c] += source[c] * weight


@kernel
def _backward(
    first: int,
    last: int,
    douts: Floats,
    q: Floats,
    partial: Floats,
    blocks: Floats,
    weights: Floats,
    scores: Floats,
    rstd: Floats,
    dpartial: Floats,
    dblocks: Floats,
    dq: Floats,
) -> None:
    n, H = q.shape
    m, T = blocks.shape[0], partial.shape[0]
    dw = np.empty(m + 1, dtype=np.float32)
    for block in range(first, last):
        dq[block] = 0.0
        for t in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, T)):
            now, unit, dnow = partial[t], rstd[t], dpartial[t]
            dnow[:] = 0.0
            for j in range(m):
                dblocks[j, t] = 0.0
            along = np.float32(0.0)
            for i in range(n):
                query, w, grad, dquery = q[i], weights[t, i], douts[i, t], dq[block, i]
                mean = np.float32(0.0)
                for j in range(m + 1):
                    source = now if j == m else blocks[j, t]
                    value = np.float32(0.0)
                    for c in range(H):
                        value += grad[c] * source[c]
                    dw[j] = value * unit if j == m else value
                    mean += w[j] * dw[j]
                for j in range(m + 1):
                    ds = w[j] * (dw[j] - mean)
                    if j == m:
                        # the gradient along the normalised block is known without another pass
                        along += w[j] * dw[j] + ds * scores[t, i]
                        ds_unit, w_unit = ds * unit, w[j] * unit
                        for c in range(H):
                            dquery[c] += ds_unit * now[c]
                            dnow[c] += w_unit * grad[c] + ds_unit * query[c]
                    else:
                        source, dsource, weight = blocks[j, t], dblocks[j, t], w[j]
                        for c in range(H):
                            dquery[c] += ds * source[c]
                            dsource[c] += weight * grad[c] + ds * query[c]
            pull = along * unit * unit / np.float32(H)
            for c in range(H):
                dnow[c] -= pull * now[c]


def forward(q: Tensor, partial: Tensor, blocks: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixtures [n, T, H], weights [T, n, m + 1], last scores [T, n] and reciprocal roots [T]."""
    (n, H), T, m = q.shape, partial.shape[0], blocks.shape[0]
    saved = torch.empty(n, T, H), torch.empty(T, n, m + 1), torch.empty(T, n), torch.empty(T)
    arrays = floats(q), floats(partial), floats(blocks), np.float32(eps)
    split(_forward, T, 4 * (m + 1) * n * partial.numel(), *arrays, *(floats(x) for x in saved))
    return saved


def backward(
    douts: Tensor, q: Tensor, partial: Tensor, blocks: Tensor, weights: Tensor, scores: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """d q [n, H], d partial [T, H] and d blocks [m, T, H] for douts [n, T, H]."""
    count = -(-partial.shape[0] // BLOCK_ROWS)
    results = torch.empty(partial.shape), torch.empty(blocks.shape), torch.empty(count, *q.shape)
    arrays = [floats(x) for x in (douts, q, partial, blocks, weights, scores, rstd, *results)]
    split(_backward, count, 8 * (blocks.shape[0] + 1) * q.shape[0] * partial.numel(), *arrays)
    dpartial, dblocks, dq = results
    return dq.sum(0), dpartial, dblocks
