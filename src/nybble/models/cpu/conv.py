"""Short causal convolution over the sequence, [B, S, C] with taps [K, C], lag 0 first."""

import torch
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel

BLOCK_ROWS = 64
"""Rows summed first in the taps' gradient: one order of additions for any number of threads."""


@kernel
def _forward(first: int, last: int, x: Floats, taps: Floats, bias: Floats, same: Floats, y: Floats) -> None:
    _, S, C = x.shape
    K, masked = taps.shape[0], same.shape[0] > 0
    for r in range(first, last):
        b, s = r // S, r % S
        out, now = y[b, s], x[b, s]
        if bias.shape[0] > 0:
            for c in range(C):
                out[c] = now[c] * taps[0, c] + bias[c]
        else:
            for c in range(C):
                out[c] = now[c] * taps[0, c]
        for lag in range(1, min(K, s + 1)):
            if masked and same[lag - 1, b, s] == 0.0:
                continue
            past, tap = x[b, s - lag], taps[lag]
            for c in range(C):
                out[c] += past[c] * tap[c]


@kernel
def _backward(
    first: int, last: int, dy: Floats, x: Floats, taps: Floats, same: Floats, dx: Floats, dtaps: Floats
) -> None:
    B, S, C = x.shape
    K, masked = taps.shape[0], same.shape[0] > 0
    for block in range(first, last):
        dtaps[block] = 0.0
        for r in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, B * S)):
            b, s = r // S, r % S
            out, here, now = dx[b, s], x[b, s], dy[b, s]
            for c in range(C):
                out[c] = now[c] * taps[0, c]
                dtaps[block, 0, c] += now[c] * here[c]
            for lag in range(1, min(K, S - s)):
                if masked and same[lag - 1, b, s + lag] == 0.0:
                    continue
                late, tap, dtap = dy[b, s + lag], taps[lag], dtaps[block, lag]
                for c in range(C):
                    out[c] += late[c] * tap[c]
                    dtap[c] += late[c] * here[c]


def _mask(same: tuple[Tensor, ...], x: Tensor) -> Floats:
    return floats(torch.stack(same)[..., 0] if same else x.new_empty(0, 1, 1))


def forward(x: Tensor, taps: Tensor, bias: Tensor | None, same: tuple[Tensor, ...]) -> Tensor:
    """y_t = bias + the sum of taps[l] * x_{t-l} over lags l that are of the same document."""
    y = torch.empty(x.shape)
    rows = x.shape[0] * x.shape[1]
    bias = x.new_empty(0) if bias is None else bias
    split(_forward, rows, 4 * x.numel(), floats(x), floats(taps), floats(bias), _mask(same, x), floats(y))
    return y


def backward(dy: Tensor, x: Tensor, taps: Tensor, same: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """d x [B, S, C] and d taps [K, C]."""
    blocks = -(-x.shape[0] * x.shape[1] // BLOCK_ROWS)
    dx, dtaps = torch.empty(x.shape), torch.empty(blocks, *taps.shape)
    arrays = [floats(t) for t in (dy, x, taps)]
    split(_backward, blocks, 8 * x.numel(), *arrays, _mask(same, x), floats(dx), floats(dtaps))
    return dx, dtaps.sum(0)
