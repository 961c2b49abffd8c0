"""Attention residuals: n queries mix m finished blocks and the normalised running one [T, H]; each mixture is
RMS-normalised. What lies apart in memory is given by its addresses."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, addresses, floats, kernel, line, loop

BLOCK_ROWS = 64

Addresses = NDArray[np.int64]


@loop
def _mixture(t: int, now: Floats, unit: np.float32, blocks: Addresses, w: Floats, out: Floats) -> None:
    """out = the sources of token t, weighted by w [m + 1]."""
    H, m = now.shape[0], blocks.shape[0]
    last_weight = w[m] * unit
    for c in range(H):
        out[c] = now[c] * last_weight
    for j in range(m):
        source, weight = line(blocks[j], t, H), w[j]
        for c in range(H):
            out[c] += source[c] * weight


@kernel
def _forward(
    first: int, last: int, q: Floats, partial: Floats, blocks: Addresses, gains: Addresses, eps: np.float32,
    norm_eps: np.float32, ys: Addresses, weights: Floats, scores: Floats, rstd: Floats, roots: Floats,
) -> None:  # fmt: skip
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
            query, w = q[i], weights[t, i]
            largest = np.float32(-np.inf)
            for j in range(m + 1):
                source = now if j == m else line(blocks[j], t, H)
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
            out, gain = line(ys[i], t, H), line(gains[i], 0, H)
            _mixture(t, now, unit, blocks, w, out)
            square = np.float32(0.0)
            for c in range(H):
                square += out[c] * out[c]
            root = np.float32(1.0) / np.sqrt(square / np.float32(H) + norm_eps)
            roots[t, i] = root
            for c in range(H):
                out[c] *= root * gain[c]


@kernel
def _backward(
    first: int, last: int, dys: Addresses, q: Floats, partial: Floats, blocks: Addresses, gains: Addresses,
    weights: Floats, scores: Floats, rstd: Floats, roots: Floats,
    dpartial: Floats, dblocks: Addresses, dq: Floats, dgains: Floats,
) -> None:  # fmt: skip
    n, H = q.shape
    m, T = blocks.shape[0], partial.shape[0]
    dw = np.empty(m + 1, dtype=np.float32)
    mixed, grad = np.empty(H, dtype=np.float32), np.empty(H, dtype=np.float32)
    for block in range(first, last):
        dq[block] = 0.0
        dgains[block] = 0.0
        for t in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, T)):
            now, unit, dnow = partial[t], rstd[t], dpartial[t]
            dnow[:] = 0.0
            for j in range(m):
                line(dblocks[j], t, H)[:] = 0.0
            along = np.float32(0.0)
            for i in range(n):
                query, w, dquery, dgain = q[i], weights[t, i], dq[block, i], dgains[block, i]
                dy, gain, root = line(dys[i], t, H), line(gains[i], 0, H), roots[t, i]
                _mixture(t, now, unit, blocks, w, mixed)
                pull = np.float32(0.0)
                for c in range(H):
                    pull += dy[c] * gain[c] * mixed[c]
                pull *= root * root * root / np.float32(H)
                for c in range(H):
                    dgain[c] += dy[c] * mixed[c] * root
                    grad[c] = dy[c] * gain[c] * root - mixed[c] * pull
                mean = np.float32(0.0)
                for j in range(m + 1):
                    source = now if j == m else line(blocks[j], t, H)
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
                        source, dsource, weight = line(blocks[j], t, H), line(dblocks[j], t, H), w[j]
                        for c in range(H):
                            dquery[c] += ds * source[c]
                            dsource[c] += weight * grad[c] + ds * query[c]
            pull = along * unit * unit / np.float32(H)
            for c in range(H):
                dnow[c] -= pull * now[c]


def forward(
    q: Tensor, partial: Tensor, blocks: list[Tensor], gains: list[Tensor], eps: float, norm_eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """n normalised mixtures [T, H]; and for `backward` weights [T, n, m + 1], last scores [T, n], and the
    reciprocal roots of the running block [T] and of the mixtures [T, n].

    q is [n, H], partial and the m blocks are [T, H], the n gains of the norms [H]; all contiguous.
    """
    (n, H), T, m = q.shape, partial.shape[0], len(blocks)
    ys = [fresh(T, H) for _ in range(n)]
    saved = [fresh(T, n, m + 1), fresh(T, n), fresh(T), fresh(T, n)]
    given = floats(q), floats(partial), addresses(blocks), addresses(gains)
    made = addresses(ys), *(floats(x) for x in saved)
    work = 4 * (m + 1) * n * partial.numel()
    split(_forward, T, work, *given, np.float32(eps), np.float32(norm_eps), *made)
    return ys, saved


def backward(
    dys: list[Tensor],
    q: Tensor,
    partial: Tensor,
    blocks: list[Tensor],
    gains: list[Tensor],
    saved: list[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """d q [n, H], d partial [T, H], d of each block [T, H] and d gains [n, H] for n times dy [T, H]."""
    (n, H), T = q.shape, partial.shape[0]
    count = -(-T // BLOCK_ROWS)
    dpartial, dblocks = fresh(T, H), [fresh(T, H) for _ in blocks]
    dq, dgains = fresh(count, n, H), fresh(count, n, H)
    given = addresses(dys), floats(q), floats(partial), addresses(blocks), addresses(gains)
    made = floats(dpartial), addresses(dblocks), floats(dq), floats(dgains)
    work = 8 * (len(blocks) + 1) * n * partial.numel()
    split(_backward, count, work, *given, *(floats(x) for x in saved), *made)
    return dq.sum(0), dpartial, dblocks, dgains.sum(0)
