"""RMS norm and L2 clip over the last axis. R rows of D columns; for the clip, row r is of head r % heads."""

import numpy as np
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel

BLOCK_ROWS = 64
CLIP_EPS = 1e-6


@kernel
def _rms(first: int, last: int, x: Floats, weight: Floats, eps: np.float32, y: Floats, rstd: Floats) -> None:
    D, weighted = x.shape[1], weight.shape[0] > 0
    for r in range(first, last):
        row, out = x[r], y[r]
        total = np.float32(0.0)
        for i in range(D):
            total += row[i] * row[i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(D) + eps)
        rstd[r] = scale
        if weighted:
            for i in range(D):
                out[i] = row[i] * scale * weight[i]
        else:
            for i in range(D):
                out[i] = row[i] * scale


@kernel
def _rms_backward(
    first: int, last: int, dy: Floats, x: Floats, weight: Floats, rstd: Floats, dx: Floats, dweight: Floats
) -> None:
    R, D = x.shape
    weighted = weight.shape[0] > 0
    for block in range(first, last):
        part = dweight[block]
        part[:] = 0.0
        for r in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, R)):
            row, grad, out, scale = x[r], dy[r], dx[r], rstd[r]
            along = np.float32(0.0)
            if weighted:
                for i in range(D):
                    along += grad[i] * weight[i] * row[i]
                pull = along * scale * scale * scale / np.float32(D)
                for i in range(D):
                    part[i] += grad[i] * row[i] * scale
                    out[i] = grad[i] * weight[i] * scale - row[i] * pull
            else:
                for i in range(D):
                    along += grad[i] * row[i]
                pull = along * scale * scale * scale / np.float32(D)
                for i in range(D):
                    out[i] = grad[i] * scale - row[i] * pull


@kernel
def _clip(
    first: int, last: int, x: Floats, scale: Floats, gain: Floats, limit: np.float32, y: Floats, norms: Floats
) -> None:
    D, heads, one = x.shape[1], scale.shape[0], np.float32(1.0)
    for r in range(first, last):
        row, out, stretch = x[r], y[r], scale[r % heads]
        total = np.float32(0.0)
        for i in range(D):
            value = row[i] * stretch[i]
            out[i] = value
            total += value * value
        norm = np.sqrt(total)
        norms[r] = norm
        shrink = limit / (norm + np.float32(CLIP_EPS))
        shrink = one if shrink > one else shrink
        shrink *= gain[r // heads] if gain.shape[0] > 0 else one
        for i in range(D):
            out[i] *= shrink


@kernel
def _clip_backward(
    first: int,
    last: int,
    dy: Floats,
    x: Floats,
    scale: Floats,
    gain: Floats,
    limit: np.float32,
    norms: Floats,
    dx: Floats,
    dscale: Floats,
) -> None:
    (R, D), heads, one = x.shape, scale.shape[0], np.float32(1.0)
    for block in range(first, last):
        for h in range(heads):
            for i in range(D):
                dscale[block, h, i] = 0.0
        for r in range(block * BLOCK_ROWS * heads, min((block + 1) * BLOCK_ROWS * heads, R)):
            h, norm = r % heads, norms[r]
            factor = limit / (norm + np.float32(CLIP_EPS))
            pull = np.float32(0.0)
            if factor < one:
                # a clipped vector keeps only a part of the gradient along itself
                along = np.float32(0.0)
                for i in range(D):
                    along += dy[r, i] * x[r, i] * scale[h, i]
                pull = factor * along / (norm * (norm + np.float32(CLIP_EPS)))
            elif factor > one:
                factor = one
            if gain.shape[0] > 0:
                factor *= gain[r // heads]
                pull *= gain[r // heads]
            for i in range(D):
                d = dy[r, i] * factor - x[r, i] * scale[h, i] * pull
                dscale[block, h, i] += d * x[r, i]
                dx[r, i] = d * scale[h, i]


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight [D] of x [..., D], and the reciprocal root of each row."""
    D = x.shape[-1]
    y, rstd = fresh(*x.shape), fresh(*x.shape[:-1])
    weight = x.new_empty(0) if weight is None else weight
    arrays = floats(x).reshape(-1, D), floats(weight), np.float32(eps), floats(y).reshape(-1, D)
    split(_rms, rstd.numel(), 2 * x.numel(), *arrays, floats(rstd).reshape(-1))
    return y, rstd


def rms_backward(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """d x [..., D] and d weight [D]."""
    D, blocks = x.shape[-1], _blocks(rstd.numel())
    dx, dweight = fresh(*x.shape), fresh(blocks, D)
    weight = x.new_empty(0) if weight is None else weight
    arrays = [floats(t).reshape(-1, D) for t in (dy, x)]
    rest = floats(weight), floats(rstd).reshape(-1), floats(dx).reshape(-1, D), floats(dweight)
    split(_rms_backward, blocks, 4 * x.numel(), *arrays, *rest)
    return dx, dweight.sum(0)


def clip(x: Tensor, scale: Tensor, gain: Tensor | None, limit: float) -> tuple[Tensor, Tensor]:
    """x [..., heads, D] * scale [heads, D], shrunk to norm `limit`, times gain [rows / heads]; the norms."""
    D = x.shape[-1]
    y, norms = fresh(*x.shape), fresh(*x.shape[:-1])
    gain = x.new_empty(0) if gain is None else gain
    arrays = floats(x).reshape(-1, D), floats(scale), floats(gain).reshape(-1), np.float32(limit)
    split(_clip, norms.numel(), 2 * x.numel(), *arrays, floats(y).reshape(-1, D), floats(norms).reshape(-1))
    return y, norms


def clip_backward(
    dy: Tensor, x: Tensor, scale: Tensor, gain: Tensor | None, limit: float, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """d x [..., heads, D] and d scale [heads, D]."""
    D, blocks = x.shape[-1], _blocks(norms.numel() // scale.shape[0])
    dx, dscale = fresh(*x.shape), fresh(blocks, *scale.shape)
    gain = x.new_empty(0) if gain is None else gain
    arrays = [floats(t).reshape(-1, D) for t in (dy, x)]
    rest = floats(scale), floats(gain).reshape(-1), np.float32(limit), floats(norms).reshape(-1)
    split(_clip_backward, blocks, 4 * x.numel(), *arrays, *rest, floats(dx).reshape(-1, D), floats(dscale))
    return dx, dscale.sum(0)
