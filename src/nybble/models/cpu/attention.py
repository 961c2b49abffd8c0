"""Attention of Inkling 2 from its projections on, a key head of a sequence at a time, and its derivative.

Each item convolves and clips its keys, convolves and normalises its values, and walks over blocks of queries:
clip, scores with bias and sink, softmax, weighted values, gate. The backward pass makes all of it again from
the projections, the attended values and one number a query.

Layout and legend: `heads.py`.
"""

import torch
from torch import Tensor

from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu import attention_passes as passes
from nybble.models.cpu.heads import Heads, Numbers, Tokens, Weights
from nybble.models.cpu.jit import floats


def _work(x: Heads, t: Tokens, s: Numbers) -> int:
    """Multiplications of one pass, for `split`."""
    T = x.q.shape[1]
    return int(x.q.shape[0] * T * min(s.window, T // t.same.shape[0]))


def forward(x: Heads, w: Weights, t: Tokens, s: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Attended values [H * D, T], the log of each query's sum [H, T], and the values times their gates."""
    (H, D), T = w.scale_q.shape, x.q.shape[1]
    out, lse, gated = fresh(H * D, T), fresh(H, T), fresh(H * D, T)
    items = t.same.shape[0] * (x.k.shape[0] // D)
    split(passes.forward, items, _work(x, t, s), x, w, t, s, floats(out), floats(lse), floats(gated))
    return out, lse, gated


def backward(
    dgated: Tensor, x: Heads, w: Weights, t: Tokens, s: Numbers, out: Tensor, lse: Tensor, dx: Heads
) -> tuple[Tensor, ...]:
    """Fills dx, and returns the gradients of the weights in their order, from that of the gated values."""
    D, B = w.scale_q.shape[1], t.same.shape[0]
    items = B * (x.k.shape[0] // D)
    parts = [
        torch.empty(items if name == "proj" else B, *weight.shape) for name, weight in w._asdict().items()
    ]
    arguments = floats(dgated), x, w, t, s, floats(out), floats(lse), dx, Weights(*(floats(p) for p in parts))
    split(passes.backward, items, 3 * _work(x, t, s), *arguments)
    return tuple(part.sum(0) for part in parts)
