"""The states of the chunked Mamba-2 scan from chunk to chunk, and their gradients back.

Items are (sequence, group): a group's chunks follow each other. Legend: `scan_passes.py`.
"""

import numpy as np

from nybble.models.cpu.jit import Floats, kernel


@kernel
def pass_on(first: int, last: int, states: Floats, carry: Floats, n: int, prev: Floats) -> None:
    """prev [Z, G, N, R * P], the state before each chunk, from what each adds."""
    G, N, W = states.shape[1:]
    P = W // (carry.shape[1] // G)
    factor = np.empty(W, dtype=np.float32)
    for t in range(first, last):
        batch, g = t // G, t % G
        prev[batch * n, g] = np.float32(0.0)
        for z in range(batch * n, (batch + 1) * n - 1):
            for w in range(W):
                factor[w] = carry[z, g * (W // P) + w // P]
            for k in range(N):
                old, new, out = prev[z, g, k], states[z, g, k], prev[z + 1, g, k]
                for w in range(W):
                    out[w] = old[w] * factor[w] + new[w]


@kernel
def pass_on_backward(
    first: int, last: int, prev: Floats, dprev: Floats, carry: Floats, n: int, ds: Floats, dlast: Floats
) -> None:
    """ds of `states` from dprev; dlast [Z, H], the gradient at the end of a chunk's `cum`."""
    G, N, W = prev.shape[1:]
    R = carry.shape[1] // G
    P = W // R
    factor, total = np.empty(W, dtype=np.float32), np.empty(W, dtype=np.float32)
    for t in range(first, last):
        batch, g = t // G, t % G
        end = (batch + 1) * n - 1
        ds[end, g] = np.float32(0.0)
        dlast[end, g * R : (g + 1) * R] = np.float32(0.0)
        for z in range(end - 1, batch * n - 1, -1):
            for w in range(W):
                factor[w] = carry[z + 1, g * R + w // P]
                total[w] = np.float32(0.0)
            for k in range(N):
                state, grad = prev[z + 1, g, k], dprev[z + 1, g, k]
                after, out = ds[z + 1, g, k], ds[z, g, k]
                for w in range(W):
                    value = grad[w] + factor[w] * after[w]
                    out[w] = value
                    total[w] += value * state[w]
            for r in range(R):
                dlast[z, g * R + r] = total[r * P : (r + 1) * P].sum()
