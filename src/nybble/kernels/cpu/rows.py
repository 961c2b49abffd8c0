"""Rows sorted by expert: their order, copies of tokens as rows, and weighted sums of rows as tokens.

T tokens, k rows a token, R = T * k rows of W columns, E experts.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.jit import compiled, kernel, source_digest
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.source import dense
from nybble.kernels.cpu.threads import split


@kernel
def _gather(first: int, last: int, x: Any, order: Any, k: int, out: Any) -> None:
    for r in range(first, last):
        row, to = x[order[r] // k], out[r]
        for i in range(to.shape[0]):
            to[i] = row[i]


@kernel
def _combine(first: int, last: int, rows: Any, place: Any, weights: Any, out: Any) -> None:
    k = place.shape[1]
    for t in range(first, last):
        to = out[t]
        for choice in range(k):
            row = rows[place[t, choice]]
            w = weights[t, choice] if weights.shape[0] > 0 else np.float32(1.0)
            if choice == 0:
                for i in range(to.shape[0]):
                    to[i] = row[i] * w
            else:
                for i in range(to.shape[0]):
                    to[i] += row[i] * w


def _sort(experts: Any, order: Any, place: Any, ends: Any) -> None:
    at = np.zeros(ends.shape[0], dtype=np.int64)
    for e in experts:
        at[e] += 1
    begin = 0
    for e in range(at.shape[0]):
        size, at[e] = at[e], begin
        begin += size
        ends[e] = begin
    for row in range(experts.shape[0]):
        e = experts[row]
        order[at[e]], place[row] = row, at[e]
        at[e] += 1


_compiled_sort = compiled(_sort, source_digest())


def sort(experts: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of `experts` [T, k], all of them below E, stably by expert.

    Returns:
        order [R]: the row (token * k + choice) at each sorted place; place [R]: its inverse; ends [E]: int32,
        where each expert's rows end.
    """
    flat = experts.reshape(-1)
    order, place, ends = torch.empty_like(flat), torch.empty_like(flat), torch.empty(E, dtype=torch.int32)
    _compiled_sort(*(dense(x) for x in (flat, order, place, ends)))
    return order, place, ends


def gather(x: Tensor, order: Tensor, k: int, out: Tensor) -> Tensor:
    """The row of x [T, W] of each pair (token * k + choice) of order [R], into out [R, W]."""
    split(_gather, out.shape[0], out.numel(), dense(x), dense(order), k, dense(out))
    return out


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Each token's sum of its rows [R, W], found by place [R], times weights [T, k] or 1: [T, W]."""
    out = fresh(place.shape[0] // k, rows.shape[1])
    factors = torch.empty(0, k) if weights is None else weights
    arrays = dense(rows), dense(place).reshape(-1, k), dense(factors), dense(out)
    split(_combine, out.shape[0], 2 * rows.numel(), *arrays)
    return out
