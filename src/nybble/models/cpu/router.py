"""Sigmoid routing. T tokens, E experts, k a token."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, floats, kernel, sigmoid

Integers = NDArray[np.int64]
TINY = 1e-20
"""Added to the sum of a token's scores, as the published model does."""


@kernel
def _choose(
    first: int, last: int, logits: Floats, shift: Floats, gain: np.float32,
    scores: Floats, experts: Integers, weights: Floats,
) -> None:  # fmt: skip
    E, k = logits.shape[1], experts.shape[1]
    for t in range(first, last):
        row, chosen = scores[t], experts[t]
        for e in range(E):
            row[e] = sigmoid(logits[t, e])
        total = np.float32(TINY)
        for i in range(k):
            best = -1
            for e in range(E):
                taken = False
                for before in range(i):
                    taken = taken or chosen[before] == e
                if not taken and (best < 0 or row[e] + shift[e] > row[best] + shift[best]):
                    best = e
            chosen[i] = best
            total += row[best]
        for i in range(k):
            weights[t, i] = row[chosen[i]] / total * gain


@kernel
def _backward(
    first: int, last: int, dweights: Floats, scores: Floats, experts: Integers, gain: np.float32, d: Floats
) -> None:
    k, one = experts.shape[1], np.float32(1.0)
    for t in range(first, last):
        d[t] = np.float32(0.0)
        total, along = np.float32(TINY), np.float32(0.0)
        for i in range(k):
            score = scores[t, experts[t, i]]
            total += score
            along += dweights[t, i] * score
        for i in range(k):
            score = scores[t, experts[t, i]]
            d[t, experts[t, i]] = gain * (dweights[t, i] - along / total) / total * score * (one - score)


def choose(logits: Tensor, shift: Tensor, k: int, gain: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [T, E], the k experts [T, k] of highest score + shift [E], and their weights [T, k]."""
    T, E = logits.shape
    scores, weights = torch.empty(T, E), torch.empty(T, k)
    experts = torch.empty(T, k, dtype=torch.int64)
    arrays = floats(logits), floats(shift), np.float32(gain), floats(scores), experts.numpy(), floats(weights)
    split(_choose, T, 16 * k * logits.numel(), *arrays)
    return scores, experts, weights


def backward(dweights: Tensor, scores: Tensor, experts: Tensor, gain: float) -> Tensor:
    """d logits [T, E]."""
    d = torch.empty_like(scores)
    arrays = floats(dweights), floats(scores), experts.numpy(), np.float32(gain), floats(d)
    split(_backward, d.shape[0], 4 * d.numel(), *arrays)
    return d
