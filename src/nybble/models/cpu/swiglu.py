"""Soft-capped SwiGLU, a tanh(g / a) sigmoid(g) b tanh(u / b), and its derivative. R rows, I columns."""

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel, sigmoid, tanh


def joined(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up beside each other, [R, 2I]: the tensor they are halves of, or a copy."""
    width = gate.shape[-1]
    if (
        gate.dim() == up.dim() == 2
        and gate.stride() == up.stride() == (2 * width, 1)
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and gate.storage_offset() + width == up.storage_offset()
    ):
        return gate.detach().as_strided((gate.shape[0], 2 * width), (2 * width, 1), gate.storage_offset())
    return torch.cat([gate.detach(), up.detach()], dim=-1).reshape(-1, 2 * width)


@kernel
def _forward(first: int, last: int, h: Floats, out: Floats, a: np.float32, b: np.float32) -> None:
    width = out.shape[1]
    over_a, over_b, ab = np.float32(1.0) / a, np.float32(1.0) / b, a * b
    for r in range(first, last):
        gate, up, y = h[r, :width], h[r, width:], out[r]
        for i in range(width):
            g = gate[i]
            y[i] = ab * tanh(g * over_a) * sigmoid(g) * tanh(up[i] * over_b)


@kernel
def _backward(
    first: int,
    last: int,
    h: Floats,
    dy: Floats,
    w: Floats,
    d: Floats,
    act: Floats,
    dw: Floats,
    a: np.float32,
    b: np.float32,
) -> None:
    width = act.shape[1]
    one = np.float32(1.0)
    over_a, over_b, ab = one / a, one / b, a * b
    for r in range(first, last):
        gate, up, dgate, dup = h[r, :width], h[r, width:], d[r, :width], d[r, width:]
        grad, y, weight = dy[r], act[r], w[r]
        total = np.float32(0.0)
        for i in range(width):
            g = gate[i]
            s, tg, tu = sigmoid(g), tanh(g * over_a), tanh(up[i] * over_b)
            left = tg * s
            value = ab * left * tu
            total += grad[i] * value
            y[i] = value * weight
            scaled = grad[i] * weight
            # d left / d g = s * (1 - tg^2) / a + left * (1 - s)
            dgate[i] = scaled * ab * tu * ((s - left * tg) * over_a + left * (one - s))
            dup[i] = scaled * a * left * (one - tu * tu)
        dw[r] = total


def forward(h: Tensor, caps: tuple[float, float]) -> Tensor:
    """h [R, 2I], gate then up -> [R, I]."""
    out = fresh(h.shape[0], h.shape[1] // 2)
    split(_forward, h.shape[0], 16 * out.numel(), floats(h), floats(out), *map(np.float32, caps))
    return out


def backward(
    h: Tensor, dy: Tensor, w: Tensor | None, caps: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of y = w * forward(h): dh [R, 2I], y [R, I] and dw [R], for dy [R, I] and w [R] or ones."""
    w = h.new_ones(h.shape[0]) if w is None else w
    d, act, dw = fresh(*h.shape), fresh(*dy.shape), fresh(*w.shape)
    arrays = [floats(x) for x in (h, dy, w, d, act, dw)]
    split(_backward, h.shape[0], 32 * dy.numel(), *arrays, *map(np.float32, caps))
    return d, act, dw
