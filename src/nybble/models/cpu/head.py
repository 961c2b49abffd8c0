"""Cross entropy of soft-capped logits and its gradient, a row at a time."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu.threads import split
from nybble.models.cpu.jit import Floats, exp, floats, kernel, tanh

LARGEST_CAP = 40.0
"""Up to this cap e^(2 cap) is a float, so that a softmax needs no maximum taken off."""


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


def rows(z: Tensor, labels: Tensor, cap: float, share: Tensor) -> Tensor:
    """Loss [n] of z [n, V] before the cap; z becomes share * d loss / d z. A label below 0 is no target."""
    nll = z.new_empty(z.shape[0])
    assert z.is_contiguous()
    split(
        _rows,
        z.shape[0],
        32 * z.numel(),
        floats(z),
        labels.contiguous().numpy(),
        floats(nll),
        np.float32(cap),
        np.float32(share.item()),
    )
    return nll
