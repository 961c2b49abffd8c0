"""Short causal convolution over the sequence, [B, S, C] with taps [K, C], lag 0 first; perhaps a SiLU."""

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, helper, kernel, sigmoid

BLOCK_ROWS = 64
"""Rows summed first in the taps' gradient: one order of additions for any number of threads."""


@helper
def _row(x: Floats, taps: Floats, bias: Floats, same: Floats, b: int, s: int, out: Floats) -> None:
    """The convolution at one token, into `out` [C]."""
    C, K, masked, now = x.shape[2], taps.shape[0], same.shape[0] > 0, x[b, s]
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
def _forward(
    first: int,
    last: int,
    x: Floats,
    taps: Floats,
    bias: Floats,
    same: Floats,
    silu: bool,
    residual: Floats,
    y: Floats,
) -> None:
    _, S, C = x.shape
    for r in range(first, last):
        out = y[r // S, r % S]
        _row(x, taps, bias, same, r // S, r % S, out)
        if silu:
            for c in range(C):
                out[c] *= sigmoid(out[c])
        if residual.shape[0] > 0:
            more = residual[r // S, r % S]
            for c in range(C):
                out[c] += more[c]


@kernel
def _through_silu(
    first: int, last: int, dy: Floats, x: Floats, taps: Floats, bias: Floats, same: Floats, d: Floats
) -> None:
    """d, the gradient before the SiLU."""
    _, S, C = x.shape
    one = np.float32(1.0)
    for r in range(first, last):
        out, grad = d[r // S, r % S], dy[r // S, r % S]
        _row(x, taps, bias, same, r // S, r % S, out)
        for c in range(C):
            s = sigmoid(out[c])
            out[c] = grad[c] * s * (one + out[c] * (one - s))


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


def forward(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    same: tuple[Tensor, ...],
    silu: bool,
    residual: Tensor | None = None,
) -> Tensor:
    """y_t = bias + the sum of taps[l] * x_{t-l} over lags l that are of the same document, through SiLU or
    not, plus a residual or not.
    """
    y = fresh(*x.shape)
    rows, bias = x.shape[0] * x.shape[1], x.new_empty(0) if bias is None else bias
    residual = x.new_empty(0, 1, 1) if residual is None else residual
    arrays = floats(x), floats(taps), floats(bias), _mask(same, x), silu, floats(residual), floats(y)
    split(_forward, rows, 4 * x.numel(), *arrays)
    return y


def backward(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None, same: tuple[Tensor, ...], silu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d x [B, S, C], d taps [K, C] and d bias [C]."""
    rows = x.shape[0] * x.shape[1]
    blocks, mask, x, dy = -(-rows // BLOCK_ROWS), _mask(same, x), x.contiguous(), dy.contiguous()
    if silu:
        d, shift = fresh(*x.shape), x.new_empty(0) if bias is None else bias
        arrays = [floats(t) for t in (dy, x, taps, shift)]
        split(_through_silu, rows, 8 * x.numel(), *arrays, mask, floats(d))
        dy = d
    dx, dtaps = fresh(*x.shape), fresh(blocks, *taps.shape)
    arrays = [floats(t) for t in (dy, x, taps)]
    split(_backward, blocks, 8 * x.numel(), *arrays, mask, floats(dx), floats(dtaps))
    return dx, dtaps.sum(0), None if bias is None else dy.sum((0, 1))
