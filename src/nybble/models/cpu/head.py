"""Cross entropy of logits, soft-capped or not, and its gradient, a row at a time."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, exp, floats, kernel, larger, tanh

LARGEST_CAP = 40.0
"""Up to this cap e^(2 cap) is a float, so that a softmax needs no maximum taken off."""

LOWEST = -86.0
"""Below this e^x is as good as zero."""


@kernel
def _rows(
    first: int,
    last: int,
    z: Floats,
    labels: NDArray[np.int64],
    nll: Floats,
    cap: np.float32,
    share: np.float32,
) -> None:
    V = z.shape[1]
    one, over = np.float32(1.0), np.float32(1.0) / cap
    mass = np.empty(V, dtype=np.float32)
    for r in range(first, last):
        row, label = z[r], labels[r]
        if label < 0:
            nll[r] = np.float32(0.0)
            row[:] = np.float32(0.0)
            continue
        total = np.float32(0.0)
        for i in range(V):
            s = tanh(row[i] * over)
            row[i] = s
            e = exp(cap * s - cap)
            mass[i] = e
            total += e
        squashed = row[label]
        nll[r] = np.log(total) + cap - cap * squashed
        factor = share / total
        for i in range(V):
            s = row[i]
            row[i] = mass[i] * factor * (one - s * s)
        row[label] -= share * (one - squashed * squashed)


@kernel
def _plain_rows(
    first: int, last: int, z: Floats, labels: NDArray[np.int64], nll: Floats, share: np.float32
) -> None:
    V = z.shape[1]
    for r in range(first, last):
        row, label = z[r], labels[r]
        if label < 0:
            nll[r] = np.float32(0.0)
            row[:] = np.float32(0.0)
            continue
        highest = row[0]
        for i in range(V):
            highest = larger(row[i], highest)
        picked, total = row[label], np.float32(0.0)
        for i in range(V):
            x = row[i] - highest
            e = exp(np.float32(LOWEST) if x < np.float32(LOWEST) else x)
            row[i] = e
            total += e
        nll[r] = np.log(total) + highest - picked
        factor = share / total
        for i in range(V):
            row[i] *= factor
        row[label] -= share


def rows(z: Tensor, labels: Tensor, cap: float | None, share: Tensor) -> Tensor:
    """Loss [n] of z [n, V] before the cap; z becomes share * d loss / d z. A label below 0 is no target."""
    nll = z.new_empty(z.shape[0])
    assert z.is_contiguous()
    arrays = floats(z), labels.contiguous().numpy(), floats(nll)
    factor = np.float32(share.item())
    if cap is None:
        split(_plain_rows, z.shape[0], 24 * z.numel(), *arrays, factor)
    else:
        split(_rows, z.shape[0], 32 * z.numel(), *arrays, np.float32(cap), factor)
    return nll
