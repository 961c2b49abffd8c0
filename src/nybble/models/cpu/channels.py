"""What happens to the channels of a head over a stretch of tokens: short convolution, clip, RMS norm.

Everything lies by channel, one row a channel, so that loops run along tokens and no sum across a register. Of
a large array a head's channels are D rows from `row` on, its tokens n columns from `at` on; what a caller
makes for itself begins at the first of both. K taps; tap l weighs the token l before.
"""

import numpy as np

from nybble.models.cpu.jit import Floats, helper, loop
from nybble.models.cpu.norms import CLIP_EPS


@helper
def tap_of(taps: Floats, dynamic: bool, lag: int, channel: int) -> np.float32:
    """The part of a tap that all tokens share, the residual's included, over the convolution's norm.

    `taps` is [C, K], the last for the token itself, or where taps are also computed (`dynamic`) [K, C], the
    first for the token itself.
    """
    K = taps.shape[0] if dynamic else taps.shape[1]
    tap = taps[lag, channel] if dynamic else taps[channel, K - 1 - lag]
    own = np.float32(1.0) if lag == 0 else np.float32(0.0)
    return (tap + own) * conv_scale(K, dynamic)


@helper
def conv_scale(K: int, dynamic: bool) -> np.float32:
    """One over the convolution's norm."""
    return np.float32(1.0 / np.sqrt(2 * K + 1 if dynamic else K + 1))


@loop
def convolve(
    x: Floats, row: int, at: int, n: int, taps: Floats, first: int, driver: Floats, drive: int, same: Floats,
    kernel: int, out: Floats,
) -> None:  # fmt: skip
    """The convolution of x, channels `first` and on, into out [D, n].

    `driver` holds computed taps, K rows from `drive` on, or nothing; `same` [K - 1, n] is 1 where the token
    that far back is of the same document, or nothing.
    """
    dynamic, masked = driver.shape[0] > 0, same.shape[0] > 0
    scale = conv_scale(kernel, dynamic)
    for i in range(out.shape[0]):
        for lag in range(min(kernel, n)):
            tap = tap_of(taps, dynamic, lag, first + i)
            size = n - lag
            past, y = x[row + i, at : at + size], out[i, lag:n]
            if lag == 0:
                for t in range(size):
                    y[t] = np.float32(0.0)
            if dynamic:
                computed = driver[drive + lag, at + lag : at + n]
                if masked and lag > 0:
                    keep = same[lag - 1, lag:n]
                    for t in range(size):
                        y[t] += past[t] * keep[t] * (tap + computed[t] * scale)
                else:
                    for t in range(size):
                        y[t] += past[t] * (tap + computed[t] * scale)
            elif masked and lag > 0:
                keep = same[lag - 1, lag:n]
                for t in range(size):
                    y[t] += past[t] * keep[t] * tap
            else:
                for t in range(size):
                    y[t] += past[t] * tap


@loop
def convolve_backward(
    dy: Floats, x: Floats, row: int, at: int, n: int, taps: Floats, first: int, driver: Floats, drive: int,
    same: Floats, kernel: int, dx: Floats, dtaps: Floats, ddriver: Floats,
) -> None:  # fmt: skip
    """From dy [D, n]: dx and ddriver, which lie as x and driver do, and these channels' part of dtaps."""
    dynamic, masked = driver.shape[0] > 0, same.shape[0] > 0
    scale = conv_scale(kernel, dynamic)
    late = np.empty(n, dtype=np.float32)
    for i in range(dy.shape[0]):
        for lag in range(kernel):
            total, size = np.float32(0.0), max(0, n - lag)
            tap = tap_of(taps, dynamic, lag, first + i)
            past, grad, to = x[row + i, at : at + size], dy[i, n - size : n], dx[row + i, at : at + size]
            if masked and lag > 0:
                keep = same[lag - 1, n - size : n]
                for t in range(size):
                    late[t] = grad[t] * keep[t]
            else:
                for t in range(size):
                    late[t] = grad[t]
            for t in range(size):
                total += late[t] * past[t]
            if lag == 0:
                for t in range(size):
                    to[t] = np.float32(0.0)
            if dynamic:
                computed = driver[drive + lag, at + n - size : at + n]
                dcomputed = ddriver[drive + lag, at + n - size : at + n]
                if i == 0:
                    ddriver[drive + lag, at : at + n] = np.float32(0.0)
                for t in range(size):
                    dcomputed[t] += late[t] * past[t] * scale
                for t in range(size):
                    to[t] += late[t] * (tap + computed[t] * scale)
                dtaps[lag, first + i] = total * scale
            else:
                for t in range(size):
                    to[t] += late[t] * tap
                dtaps[first + i, kernel - 1 - lag] = total * scale


@loop
def _squares(x: Floats, row: int, at: int, n: int, D: int, scale: Floats, total: Floats) -> None:
    """total [n] of the squares of x * scale [D]; an empty scale is ones."""
    for t in range(n):
        total[t] = np.float32(0.0)
    for i in range(D):
        line, stretch = x[row + i, at : at + n], scale[i] if scale.shape[0] > 0 else np.float32(1.0)
        for t in range(n):
            total[t] += (line[t] * stretch) * (line[t] * stretch)


@loop
def clip(
    x: Floats, row: int, at: int, n: int, scale: Floats, gain: Floats, limit: np.float32,
    factor: Floats, norm: Floats, out: Floats,
) -> None:  # fmt: skip
    """out [D, n] = x * scale [D], each token shrunk to norm `limit`, times gain [n]; notes both by token.

    Empty scale and gain are ones.
    """
    D = out.shape[0]
    _squares(x, row, at, n, D, scale, norm)
    for t in range(n):
        norm[t] = np.sqrt(norm[t])
        shrink = limit / (norm[t] + np.float32(CLIP_EPS))
        factor[t] = np.float32(1.0) if shrink > np.float32(1.0) else shrink
    for i in range(D):
        line, y = x[row + i, at : at + n], out[i, :n]
        stretch = scale[i] if scale.shape[0] > 0 else np.float32(1.0)
        for t in range(n):
            y[t] = line[t] * stretch * factor[t]
        if gain.shape[0] > 0:
            for t in range(n):
                y[t] *= gain[t]


@loop
def clip_backward(
    dy: Floats, x: Floats, row: int, at: int, n: int, scale: Floats, gain: Floats,
    factor: Floats, norm: Floats, dx: Floats, dscale: Floats,
) -> None:  # fmt: skip
    """From dy [D, n], which it overwrites, and what `clip` noted: dx, which lies as x does, and what adds to
    dscale [D]."""
    D, learned = dy.shape[0], scale.shape[0] > 0
    pull = np.zeros(n, dtype=np.float32)
    for i in range(D):
        grad, line = dy[i, :n], x[row + i, at : at + n]
        stretch = scale[i] if learned else np.float32(1.0)
        if gain.shape[0] > 0:
            for t in range(n):
                grad[t] *= gain[t]
        for t in range(n):
            pull[t] += grad[t] * line[t] * stretch
    for t in range(n):
        # a clipped vector keeps only a part of the gradient along itself
        whole = norm[t] * (norm[t] + np.float32(CLIP_EPS))
        part = factor[t] * pull[t] / (whole if whole > np.float32(0.0) else np.float32(1.0))
        pull[t] = part if factor[t] < np.float32(1.0) else np.float32(0.0)
    for i in range(D):
        grad, line, to = dy[i, :n], x[row + i, at : at + n], dx[row + i, at : at + n]
        stretch, total = scale[i] if learned else np.float32(1.0), np.float32(0.0)
        for t in range(n):
            grad[t] = grad[t] * factor[t] - line[t] * stretch * pull[t]
        for t in range(n):
            total += grad[t] * line[t]
        for t in range(n):
            to[t] = grad[t] * stretch
        if learned:
            dscale[i] += total


@loop
def rms(x: Floats, n: int, eps: np.float32, rstd: Floats) -> None:
    """x [D, n] over the root of each token's mean square, in place; notes the reciprocal root."""
    D = x.shape[0]
    _squares(x, 0, 0, n, D, np.empty(0, dtype=np.float32), rstd)
    for t in range(n):
        rstd[t] = np.float32(1.0) / np.sqrt(rstd[t] / np.float32(D) + eps)
    for i in range(D):
        line = x[i, :n]
        for t in range(n):
            line[t] *= rstd[t]


@loop
def rms_backward(dy: Floats, y: Floats, n: int, rstd: Floats) -> None:
    """dy [D, n], the gradient of the normalised y, becomes that of what `rms` took."""
    D = y.shape[0]
    pull = np.zeros(n, dtype=np.float32)
    for i in range(D):
        grad, line = dy[i, :n], y[i, :n]
        for t in range(n):
            pull[t] += grad[t] * line[t]
    for t in range(n):
        pull[t] /= np.float32(D)
    for i in range(D):
        grad, line = dy[i, :n], y[i, :n]
        for t in range(n):
            grad[t] = (grad[t] - line[t] * pull[t]) * rstd[t]
