"""RMS norm of x * silu(gate) over groups of columns, and its derivative. T rows of D columns in G groups."""

import numpy as np
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel, sigmoid

BLOCK_ROWS = 64


@kernel
def _forward(
    first: int, last: int, x: Floats, gate: Floats, weight: Floats, eps: np.float32, y: Floats, rstd: Floats
) -> None:
    D, G = x.shape[1], rstd.shape[1]
    size = D // G
    for r in range(first, last):
        for g in range(G):
            row, z = x[r, g * size : (g + 1) * size], gate[r, g * size : (g + 1) * size]
            out, w = y[r, g * size : (g + 1) * size], weight[g * size : (g + 1) * size]
            total = np.float32(0.0)
            for i in range(size):
                value = row[i] * z[i] * sigmoid(z[i])
                out[i] = value
                total += value * value
            scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
            rstd[r, g] = scale
            for i in range(size):
                out[i] *= scale * w[i]


@kernel
def _backward(
    first: int,
    last: int,
    dy: Floats,
    x: Floats,
    gate: Floats,
    weight: Floats,
    rstd: Floats,
    dx: Floats,
    dgate: Floats,
    dweight: Floats,
) -> None:
    (T, D), G = x.shape, rstd.shape[1]
    size, one = D // G, np.float32(1.0)
    for block in range(first, last):
        dweight[block] = np.float32(0.0)
        for r in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, T)):
            for g in range(G):
                row, z = x[r, g * size : (g + 1) * size], gate[r, g * size : (g + 1) * size]
                grad, w = dy[r, g * size : (g + 1) * size], weight[g * size : (g + 1) * size]
                out, dz = dx[r, g * size : (g + 1) * size], dgate[r, g * size : (g + 1) * size]
                part, scale = dweight[block, g * size : (g + 1) * size], rstd[r, g]
                along = np.float32(0.0)
                for i in range(size):
                    s = sigmoid(z[i])
                    value = row[i] * z[i] * s
                    part[i] += grad[i] * value * scale
                    along += grad[i] * w[i] * value
                    dz[i] = s
                pull = along * scale * scale * scale / np.float32(size)
                for i in range(size):
                    s = dz[i]
                    silu = z[i] * s
                    d = grad[i] * w[i] * scale - row[i] * silu * pull
                    out[i] = d * silu
                    dz[i] = d * row[i] * (s + silu * (one - s))


def forward(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised [..., D] and the reciprocal root of each group [T, G]."""
    D = x.shape[-1]
    y, rstd = fresh(*x.shape), fresh(x.numel() // D, groups)
    arrays = floats(x).reshape(-1, D), floats(gate).reshape(-1, D), floats(weight), np.float32(eps)
    split(_forward, rstd.shape[0], 8 * x.numel(), *arrays, floats(y).reshape(-1, D), floats(rstd))
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx and dgate [..., D], dweight [D]."""
    D, blocks = x.shape[-1], -(-rstd.shape[0] // BLOCK_ROWS)
    dx, dgate, dweight = fresh(*x.shape), fresh(*x.shape), fresh(blocks, D)
    arrays = [floats(t).reshape(-1, D) for t in (dy, x, gate)]
    made = floats(dx).reshape(-1, D), floats(dgate).reshape(-1, D), floats(dweight)
    split(_backward, blocks, 16 * x.numel(), *arrays, floats(weight), floats(rstd), *made)
    return dx, dgate, dweight.sum(0)
