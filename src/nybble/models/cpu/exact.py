"""Products, attention and elementary functions whose bits depend on a row alone, not on its batch.

A BLAS picks its blocking by the shape of the whole product, so a row multiplied alone may differ in its last
bit from the same row among others; vectorised loops treat their tail differently from their body. Here each
number comes from one fixed order of additions, compiled without fast-math, so that vector lanes and scalar
tails agree. Slower than a BLAS: `models.invariant` says when to use it.

Legend: M rows, K inputs, N outputs; B sequences, S queries, T keys, H query heads, h key heads, D head size,
R relative weights.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.jit import helper, kernel
from nybble.kernels.cpu.threads import split
from nybble.models.cpu import jit
from nybble.models.cpu.jit import Floats, floats
from nybble.models.cpu.softmax import LOWEST

Integers = NDArray[np.int64]

_exp = helper(jit.exp.py_func)
_clamp = helper(jit.clamp.py_func)


@helper
def _sigmoid_of(x: np.float32) -> np.float32:
    return np.float32(1.0) / (np.float32(1.0) + _exp(-_clamp(x, np.float32(87.0))))


@helper
def _tanh_of(x: np.float32) -> np.float32:
    """Through exp of a negative number; a series near zero, where the difference would cancel."""
    a = abs(_clamp(x, np.float32(9.0)))
    e = _exp(-(a + a))
    far = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    z = a * a
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z - np.float32(5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z - np.float32(3.33332819422e-1)
    near = p * z * a + a
    y = near if z < np.float32(0.390625) else far
    return -y if x < np.float32(0.0) else y


@kernel
def _sigmoid(first: int, last: int, x: Floats, y: Floats) -> None:
    for i in range(first, last):
        y[i] = _sigmoid_of(x[i])


@kernel
def _tanh(first: int, last: int, x: Floats, y: Floats) -> None:
    for i in range(first, last):
        y[i] = _tanh_of(x[i])


@kernel
def _log(first: int, last: int, x: Floats, y: Floats) -> None:
    for i in range(first, last):
        y[i] = np.log(x[i])


@kernel
def _matmul(first: int, last: int, a: Floats, b: Floats, out: Floats) -> None:
    """Sums over k from the first to the last; four at a time only so that `out` is loaded less often."""
    K, N = b.shape
    whole = K - K % 4
    for i in range(first, last):
        row, y = a[i], out[i]
        for j in range(N):
            y[j] = np.float32(0.0)
        for k in range(0, whole, 4):
            x0, x1, x2, x3 = row[k], row[k + 1], row[k + 2], row[k + 3]
            w0, w1, w2, w3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for j in range(N):
                y[j] = (((y[j] + x0 * w0[j]) + x1 * w1[j]) + x2 * w2[j]) + x3 * w3[j]
        for k in range(whole, K):
            x, w = row[k], b[k]
            for j in range(N):
                y[j] = y[j] + x * w[j]


@kernel
def _attend(
    first: int,
    last: int,
    q: Floats,
    keys: Floats,
    values: Floats,
    rel: Floats,
    bank: Floats,
    sink: Floats,
    documents: Integers,
    key_documents: Integers,
    window: int,
    scale: np.float32,
    out: Floats,
) -> None:
    """q [B, S, H, D], keys [B, h, D, T], values [B, T, h, D], bank [R, extent] with the farthest first."""
    _, S, H, D = q.shape
    h, T = keys.shape[1], keys.shape[3]
    R, extent = bank.shape
    packed = documents.shape[0] > 0
    line, bias = np.empty(T, dtype=np.float32), np.empty(T, dtype=np.float32)
    for t in range(first, last):
        b, s, head = t // (S * H), t // H % S, t % H
        g = head // (H // h)
        own = T - S + s
        begin = max(0, own - window + 1)
        if packed:
            while key_documents[b, begin] != documents[b, s]:
                begin += 1
        size, here = own + 1 - begin, q[b, s, head]
        row = line[:size]
        row[:] = np.float32(0.0)
        for d in range(D):
            x, key = here[d], keys[b, g, d, begin : own + 1]
            for j in range(size):
                row[j] += x * key[j]
        for j in range(size):
            row[j] *= scale
        near = min(size, extent)
        close, shift = row[size - near :], bias[:near]
        shift[:] = np.float32(0.0)
        for r in range(R):
            x, profile = rel[b, s, head, r], bank[r, extent - near :]
            for j in range(near):
                shift[j] += x * profile[j]
        for j in range(near):
            close[j] += shift[j]
        if packed:
            for j in range(size):
                if key_documents[b, begin + j] != documents[b, s]:
                    row[j] = -np.inf
        highest = sink[b, s, head]
        for j in range(size):
            highest = row[j] if row[j] > highest else highest
        for j in range(size):
            x = row[j] - highest
            e = _exp(np.float32(LOWEST) if x < np.float32(LOWEST) else x)
            row[j] = np.float32(0.0) if x < np.float32(LOWEST) else e
        total = np.float32(0.0)
        for j in range(size):
            total += row[j]
        lost = sink[b, s, head] - highest
        total += _exp(np.float32(LOWEST) if lost < np.float32(LOWEST) else lost)
        y = out[b, s, head]
        y[:] = np.float32(0.0)
        for j in range(size):
            x, value = row[j], values[b, begin + j, g]
            for d in range(D):
                y[d] += x * value[d]
        for d in range(D):
            y[d] /= total


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] in FP32, each element added over K in order."""
    out = torch.empty(a.shape[0], b.shape[1])
    work = out.numel() * max(1, a.shape[1] // 4)
    split(_matmul, a.shape[0], work, floats(a.float()), floats(b.float()), floats(out))
    return out


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), element by element, FP32."""
    return _elementwise(_sigmoid, x)


def tanh(x: Tensor) -> Tensor:
    """tanh x, element by element, FP32."""
    return _elementwise(_tanh, x)


def log(x: Tensor) -> Tensor:
    """ln x, element by element, FP32."""
    return _elementwise(_log, x)


def _elementwise(function: Any, x: Tensor) -> Tensor:
    y = torch.empty(x.shape)
    split(function, x.numel(), 8 * x.numel(), floats(x).reshape(-1), floats(y).reshape(-1))
    return y


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """The attention of `inkling2.attend`, with the same arguments: a query's keys in order, whatever lies
    around them."""
    out = torch.empty(q.shape)
    if q.numel() == 0:
        return out
    none = torch.empty(0, 0, dtype=torch.int64)
    T = k.shape[1]
    documents = [none if x is None else x.long().contiguous() for x in (queries, keys)]
    by_feature = k.permute(0, 2, 3, 1)
    arrays = [floats(x) for x in (q, by_feature, v, rel, proj.flip(1), sink)]
    labels = [x.numpy() for x in documents]
    items = q.shape[0] * q.shape[1] * q.shape[2]
    reach = T if window is None else min(window, T)
    split(_attend, items, q.numel() * reach, *arrays, *labels, reach, np.float32(scale), floats(out))
    return out
