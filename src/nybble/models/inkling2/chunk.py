"""The softmax of `cpu/softmax.py` in plain torch, for any device: same arguments, results and legend."""

import torch
from torch import Tensor


def _slide(bias: Tensor, C: int, G: int, K: int) -> Tensor:
    """View [Q, C * G, C + K - 1] over distances (column m is K - 1 - m) as [Q, C, G, K] over keys."""
    Q, _, L = bias.shape
    return bias.as_strided((Q, C, G, K), (C * G * L, G * L - 1, L, 1), bias.storage_offset() + C - 1)


def forward(
    scores: Tensor,
    bias: Tensor,
    sink: Tensor,
    documents: tuple[Tensor, Tensor] | None,
    window: int,
    G: int,
    scale: float,
) -> Tensor:
    """See `cpu.softmax.forward`."""
    (Q, rows, K), n = scores.shape, bias.shape[2]
    C = rows // G
    line = scores.new_zeros(Q, rows, C + K - 1)
    line[:, :, K - n : K] = bias
    line[:, :, K:] = -torch.inf  # keys after the query
    line[:, :, : max(K - window, 0)] = -torch.inf
    scores.mul_(scale).view(Q, C, G, K).add_(_slide(line, C, G, K))
    if documents is not None:
        now, past = documents
        apart = (now[:, :, None] != past[:, None, :])[:, None, :, None]
        scores.view(len(now), -1, C, G, K).masked_fill_(apart, -torch.inf)
    whole = torch.softmax(torch.cat([scores, sink[..., None]], dim=-1), dim=-1)
    scores.copy_(whole[..., :K])
    return whole[..., K].contiguous()


def backward(
    p: Tensor, sunk: Tensor, d: Tensor, n: int, _window: int, G: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `cpu.softmax.backward`; what lies beyond the window has probability zero."""
    Q, rows, K = p.shape
    C = rows // G
    mean = (p * d).sum(-1, keepdim=True)
    d.sub_(mean).mul_(p)
    line = p.new_zeros(Q, rows, C + K - 1)
    _slide(line, C, G, K).copy_(d.view(Q, C, G, K))
    d.mul_(scale)
    return line[:, :, K - n : K].contiguous(), -sunk * mean[..., 0]
