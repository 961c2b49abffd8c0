"""Elementwise passes of the chunked Mamba-2 scan and of its derivative; `scan.py` has the
products between, `scan_states.py` what goes from chunk to chunk.

Legend: B sequences of S tokens, n chunks of L tokens each, Z = B * n; H heads of width P in G groups of R, N
state; D = H * P. `xbc` [B, S, D + 2 * G * N] holds x, B and C beside each other. The formulas are in
`nemotron_h/scan.py`. Rows beyond the sequence are zeros. `starts` [B, S] is where each token's document
starts, or empty.
"""

import numpy as np
from numpy.typing import NDArray

from nybble.models.cpu.jit import Floats, exp, helper, kernel

Integers = NDArray[np.int64]
LOWEST = -86.0
"""Below this e^x is as good as zero."""


@helper
def decay(x: np.float32) -> np.float32:
    """e^x for x <= 0."""
    return exp(np.float32(LOWEST) if x < np.float32(LOWEST) else x)


@kernel
def arrange(
    first: int,
    last: int,
    xbc: Floats,
    dt: Floats,
    A: Floats,
    starts: Integers,
    u: Floats,
    ue: Floats,
    b: Floats,
    c: Floats,
    cum: Floats,
    enter: Floats,
    carry: Floats,
) -> None:
    """Of each chunk u = x * dt [Z, H, L, P]; ue [Z, G, L, R * P], decayed to the chunk's end; B and C
    [Z, G, L, N]; cum [Z, H, L], the running sum of dt * A; enter [Z, H, L] and carry [Z, H], how much of the
    state before the chunk reaches each token and the chunk's end.
    """
    S, (H, L, P), (G, N) = xbc.shape[1], u.shape[1:], (b.shape[1], b.shape[3])
    R, n, packed = H // G, -(-S // L), starts.shape[0] > 0
    zero = np.float32(0.0)
    for z in range(first, last):
        row0 = z % n * L
        batch, count = z // n, min(L, S - row0)
        begin = starts[batch, row0 + count - 1] - row0 if packed else -1
        for h in range(H):
            total = zero
            for i in range(L):
                if i < count:
                    total += dt[batch, row0 + i, h] * A[h]
                cum[z, h, i] = total
            carry[z, h] = decay(total) if begin < 0 else zero
        for i in range(L):
            if i >= count:
                for h in range(H):
                    u[z, h, i, :] = zero
                    enter[z, h, i] = zero
                for g in range(G):
                    ue[z, g, i, :] = zero
                    b[z, g, i, :] = zero
                    c[z, g, i, :] = zero
                continue
            row = xbc[batch, row0 + i]
            within = starts[batch, row0 + i] >= row0 if packed else False
            for h in range(H):
                enter[z, h, i] = zero if within else decay(cum[z, h, i])
                step = dt[batch, row0 + i, h]
                left = decay(cum[z, h, L - 1] - cum[z, h, i]) if i >= begin else zero
                x, out = row[h * P : (h + 1) * P], u[z, h, i]
                ended = ue[z, h // R, i, h % R * P : (h % R + 1) * P]
                for p in range(P):
                    value = x[p] * step
                    out[p] = value
                    ended[p] = value * left
            for g in range(G):
                b[z, g, i, :] = row[H * P + g * N : H * P + (g + 1) * N]
                c[z, g, i, :] = row[H * P + (G + g) * N : H * P + (G + g + 1) * N]


@kernel
def weigh(first: int, last: int, cb: Floats, cum: Floats, starts: Integers, S: int, m: Floats) -> None:
    """m [Z, H, L, L] = cb [Z, G, L, L] times the decay from token j to token i; items are (chunk, head)."""
    (H, L), R = cum.shape[1:], cum.shape[1] // cb.shape[1]
    n, packed, zero = -(-S // L), starts.shape[0] > 0, np.float32(0.0)
    for t in range(first, last):
        z, h = t // H, t % H
        for i in range(L):
            low = _low(starts, z, i, n, L, S) if packed else 0
            out, source = m[z, h, i, low : i + 1], cb[z, h // R, i, low : i + 1]
            past, now = cum[z, h, low : i + 1], cum[z, h, i]
            for j in range(i + 1 - low):
                out[j] = source[j] * decay(now - past[j])
            m[z, h, i, :low] = zero
            m[z, h, i, i + 1 :] = zero


@helper
def _low(starts: Integers, z: int, i: int, n: int, L: int, S: int) -> int:
    """First row of the chunk that row i may see."""
    row = z % n * L + i
    if row >= S:
        return i
    return max(0, starts[z // n, row] - z % n * L)


@kernel
def weigh_backward(
    first: int, last: int, cb: Floats, cum: Floats, starts: Integers, S: int, dm: Floats, dcb: Floats
) -> None:
    """dcb from dm, the gradient of `weigh`'s result, which is then overwritten by that result; items are
    (chunk, group).
    """
    (H, L), G = cum.shape[1:], cb.shape[1]
    R, n, packed, zero = H // G, -(-S // L), starts.shape[0] > 0, np.float32(0.0)
    for t in range(first, last):
        z, g = t // G, t % G
        dcb[z, g] = zero
        for h in range(g * R, (g + 1) * R):
            for i in range(L):
                low = _low(starts, z, i, n, L, S) if packed else 0
                grad, source = dm[z, h, i, low : i + 1], cb[z, g, i, low : i + 1]
                out, past, now = dcb[z, g, i, low : i + 1], cum[z, h, low : i + 1], cum[z, h, i]
                for j in range(i + 1 - low):
                    e = decay(now - past[j])
                    out[j] += grad[j] * e
                    grad[j] = source[j] * e
                dm[z, h, i, :low] = zero
                dm[z, h, i, i + 1 :] = zero


@kernel
def join(
    first: int, last: int, near: Floats, far: Floats, enter: Floats, xbc: Floats, D: Floats, y: Floats
) -> None:
    """y [B, S, D] = near [Z, H, L, P] + enter * far [Z, G, L, R * P] + D * x."""
    S, (H, L, P) = y.shape[1], near.shape[1:]
    R, n = H // far.shape[1], -(-S // L)
    for z in range(first, last):
        row0 = z % n * L
        for i in range(min(L, S - row0)):
            row, out = xbc[z // n, row0 + i], y[z // n, row0 + i]
            for h in range(H):
                a, c = near[z, h, i], far[z, h // R, i, h % R * P : (h % R + 1) * P]
                x, o = row[h * P : (h + 1) * P], out[h * P : (h + 1) * P]
                factor, skip = enter[z, h, i], D[h]
                for p in range(P):
                    o[p] = a[p] + factor * c[p] + skip * x[p]


@kernel
def spread(first: int, last: int, dy: Floats, enter: Floats, near: Floats, far: Floats) -> None:
    """The gradients of `join`'s near and far."""
    S, (H, L, P) = dy.shape[1], near.shape[1:]
    R, n = H // far.shape[1], -(-S // L)
    for z in range(first, last):
        row0 = z % n * L
        count = min(L, S - row0)
        for i in range(L):
            for h in range(H):
                a, c = near[z, h, i], far[z, h // R, i, h % R * P : (h % R + 1) * P]
                if i >= count:
                    a[:] = np.float32(0.0)
                    c[:] = np.float32(0.0)
                    continue
                grad, factor = dy[z // n, row0 + i, h * P : (h + 1) * P], enter[z, h, i]
                for p in range(P):
                    a[p] = grad[p]
                    c[p] = grad[p] * factor


@kernel
def collect(
    first: int,
    last: int,
    dy: Floats,
    y: Floats,
    xbc: Floats,
    dt: Floats,
    A: Floats,
    D: Floats,
    starts: Integers,
    cum: Floats,
    du: Floats,
    due: Floats,
    db: Floats,
    dc: Floats,
    dlast: Floats,
    dxbc: Floats,
    ddt: Floats,
    dA: Floats,
    dD: Floats,
) -> None:
    """dxbc, ddt [B, S, H], and of each chunk dA and dD [Z, H].

    `cum` of a token scales all that its output takes in and, inversely, all that its input gives: its
    gradient is <dy, y - D x> - <u, du>, without another pass over pairs of tokens.
    """
    S, (H, L, P), (G, N) = dy.shape[1], du.shape[1:], (db.shape[1], db.shape[3])
    R, n, packed = H // G, -(-S // L), starts.shape[0] > 0
    zero = np.float32(0.0)
    dcum = np.empty((H, L), dtype=np.float32)
    for z in range(first, last):
        row0 = z % n * L
        batch, count = z // n, min(L, S - row0)
        begin = starts[batch, row0 + count - 1] - row0 if packed else -1
        dD[z], dA[z] = zero, zero
        for i in range(count):
            row, out = xbc[batch, row0 + i], dxbc[batch, row0 + i]
            for h in range(H):
                left = decay(cum[z, h, L - 1] - cum[z, h, i]) if i >= begin else zero
                step, skip = dt[batch, row0 + i, h], D[h]
                x, dx = row[h * P : (h + 1) * P], out[h * P : (h + 1) * P]
                grad, value = (
                    dy[batch, row0 + i, h * P : (h + 1) * P],
                    y[batch, row0 + i, h * P : (h + 1) * P],
                )
                near, far = du[z, h, i], due[z, h // R, i, h % R * P : (h % R + 1) * P]
                given, taken, skipped = zero, zero, zero
                for p in range(P):
                    d = near[p] + left * far[p]
                    given += x[p] * d
                    taken += grad[p] * value[p]
                    skipped += grad[p] * x[p]
                    dx[p] = d * step + skip * grad[p]
                dD[z, h] += skipped
                ddt[batch, row0 + i, h] = given
                dcum[h, i] = taken - skip * skipped - step * given
            for g in range(G):
                out[H * P + g * N : H * P + (g + 1) * N] = db[z, g, i]
                out[H * P + (G + g) * N : H * P + (G + g + 1) * N] = dc[z, g, i]
        for h in range(H):
            total = dlast[z, h]
            for back in range(count):
                i = count - 1 - back
                total += dcum[h, i]
                ddt[batch, row0 + i, h] += total * A[h]
                dA[z, h] += total * dt[batch, row0 + i, h]
