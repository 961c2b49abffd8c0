"""Scores of a block of queries against the keys that they reach, and products with them.

A block lies by key: st[j - lo, c] belongs to key j and query c0 + c, so that loops run along queries. Query c
reaches keys c - window + 1 to c; of a group of ROWS keys only the columns of `reach` are computed, and what
of them a query does not reach is zero after the softmax.
"""

import numpy as np
from numpy.typing import NDArray

from nybble.kernels.cpu.tile import LANES, ROWS, multiply
from nybble.models.cpu.jit import Floats, exp, helper, larger, loop
from nybble.models.cpu.softmax import LOWEST

BLOCK = 64
"""Queries of a block."""

Integers = NDArray[np.int64]


@helper
def reach(j: int, c0: int, n: int, window: int) -> tuple[int, int]:
    """Columns [begin, end) computed for the group of keys that begins with j, whole tiles."""
    begin = max(0, j - c0) // LANES * LANES
    end = min(n, j + ROWS - 1 + window - c0)
    return begin, (end + LANES - 1) // LANES * LANES


@helper
def inside(j: int, c0: int, n: int, window: int) -> tuple[int, int]:
    """Columns [begin, end) of the queries that reach key j."""
    return max(0, j - c0), min(n, j + window - c0)


@helper
def against_keys(keys: Floats, block: Floats, c0: int, n: int, lo: int, window: int, st: Floats) -> None:
    """st[j - lo, c] = keys [D, S][:, j] . block [D, BLOCK][:, c] within `reach`."""
    D, width = keys.shape
    for j in range(lo, c0 + n, ROWS):
        begin, end = reach(j, c0, n, window)
        rows = min(ROWS, c0 + n - j)
        at = (j - lo) * BLOCK + begin
        multiply(keys, j, 1, width, block, begin, BLOCK, st, at, BLOCK, rows, end - begin, D, False)


@helper
def over_keys(values: Floats, st: Floats, c0: int, n: int, lo: int, window: int, out: Floats) -> None:
    """out [D, BLOCK][:, c] = sum over keys of values [D, S][:, j] * st[j - lo, c]."""
    D, width = values.shape
    for begin in range(0, n, LANES):
        low = max(lo, c0 + begin - window + 1)
        count = min(c0 + begin + LANES, c0 + n) - low
        at = (low - lo) * BLOCK + begin
        multiply(values, low, width, 1, st, at, BLOCK, out, begin, BLOCK, D, LANES, count, False)


@helper
def onto_keys(st: Floats, block: Floats, c0: int, n: int, lo: int, window: int, out: Floats) -> None:
    """out [S, D][j] += sum over queries of st[j - lo, c] * block [BLOCK, D][c]."""
    D = block.shape[1]
    for j in range(lo, c0 + n, ROWS):
        begin, end = reach(j, c0, n, window)
        rows = min(ROWS, c0 + n - j)
        at = (j - lo) * BLOCK + begin
        multiply(st, at, BLOCK, 1, block, begin * D, D, out, j * D, D, rows, D, min(end, n) - begin, True)


@helper
def biased(c0: int, n: int, window: int, extent: int) -> int:
    """How many distances have a bias in a block."""
    return min(window, extent, c0 + n)


@loop
def add_bias(
    st: Floats, rel: Floats, proj: Floats, c0: int, n: int, lo: int, window: int, bias: Floats
) -> None:
    """Add rel [R, BLOCK][:, c] . proj [extent, R][distance] to every score within the extent.

    `bias` [extent * BLOCK] is room for it by distance.
    """
    extent, R = proj.shape
    near = biased(c0, n, window, extent)
    multiply(proj, 0, R, 1, rel, 0, BLOCK, bias, 0, BLOCK, near, BLOCK, R, False)
    for j in range(lo, c0 + n):
        begin, end = inside(j, c0, n, near)
        row, at = st[j - lo, begin:end], (c0 + begin - j) * BLOCK + begin
        for c in range(end - begin):
            row[c] += bias[at + c * (BLOCK + 1)]


@loop
def bias_backward(
    dst: Floats, rel: Floats, proj: Floats, c0: int, n: int, lo: int, window: int, bias: Floats,
    drel: Floats, dproj: Floats,
) -> None:  # fmt: skip
    """From the gradients of scores: drel [R, BLOCK], and what adds to dproj [extent, R]; `rel` [BLOCK, R]."""
    extent, R = proj.shape
    near = biased(c0, n, window, extent)
    bias[: near * BLOCK] = np.float32(0.0)
    for j in range(lo, c0 + n):
        begin, end = inside(j, c0, n, near)
        row, at = dst[j - lo, begin:end], (c0 + begin - j) * BLOCK + begin
        for c in range(end - begin):
            bias[at + c * (BLOCK + 1)] = row[c]
    multiply(proj, 0, 1, R, bias, 0, BLOCK, drel, 0, BLOCK, R, BLOCK, near, False)
    multiply(bias, 0, BLOCK, 1, rel, 0, R, dproj, 0, R, near, R, n, True)


@helper
def part_documents(st: Floats, document: Integers, c0: int, n: int, lo: int, window: int) -> None:
    """Scores between tokens of different documents [S] become -infinity."""
    for j in range(lo, c0 + n):
        begin, end = inside(j, c0, n, window)
        row, here = st[j - lo], document[j]
        for c in range(begin, end):
            if document[c0 + c] != here:
                row[c] = -np.inf


@helper
def _exp_rows(st: Floats, shift: Floats, c0: int, n: int, lo: int, window: int) -> None:
    """Each score becomes e^(score - shift [BLOCK]); what is computed but not reached becomes zero."""
    for j in range(lo, c0 + n):
        left, right = reach(j - (j - lo) % ROWS, c0, n, window)
        begin, end = inside(j, c0, n, window)
        st[j - lo, left:begin] = np.float32(0.0)
        st[j - lo, end:right] = np.float32(0.0)
        row, less = st[j - lo, begin:end], shift[begin:end]
        for c in range(end - begin):
            x = row[c] - less[c]
            e = exp(np.float32(LOWEST) if x < np.float32(LOWEST) else x)
            row[c] = np.float32(0.0) if x < np.float32(LOWEST) else e


@helper
def softmax(
    st: Floats, sink: Floats, c0: int, n: int, lo: int, window: int, share: Floats, lse: Floats
) -> None:
    """Scores become e^(score - highest); share [BLOCK] is one over their sum and the sink's, lse its log."""
    for c in range(n):
        lse[c] = sink[c]
    for j in range(lo, c0 + n):
        begin, end = inside(j, c0, n, window)
        row, high = st[j - lo, begin:end], lse[begin:end]
        for c in range(end - begin):
            high[c] = larger(row[c], high[c])
    _exp_rows(st, lse, c0, n, lo, window)
    for c in range(n):
        share[c] = exp(max(sink[c] - lse[c], np.float32(LOWEST)))
    for j in range(lo, c0 + n):
        begin, end = inside(j, c0, n, window)
        row, total = st[j - lo, begin:end], share[begin:end]
        for c in range(end - begin):
            total[c] += row[c]
    for c in range(n):
        lse[c] += np.log(share[c])
        share[c] = np.float32(1.0) / share[c]


@helper
def probabilities(st: Floats, lse: Floats, c0: int, n: int, lo: int, window: int) -> None:
    """Scores become probabilities, from the log of their sum that `softmax` gave."""
    _exp_rows(st, lse, c0, n, lo, window)


@helper
def softmax_backward(p: Floats, dst: Floats, mean: Floats, c0: int, n: int, lo: int, window: int) -> None:
    """dst, the gradient of the probabilities p, becomes that of the scores; mean [BLOCK] is p . dst."""
    for j in range(lo, c0 + n):
        begin, end = reach(j - (j - lo) % ROWS, c0, n, window)
        mass, grad = p[j - lo, begin:end], dst[j - lo, begin:end]
        less = mean[begin:end]
        for c in range(end - begin):
            grad[c] = mass[c] * (grad[c] - less[c])
