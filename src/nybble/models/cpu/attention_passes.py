"""Kernels of `attention.py`: a key head of a sequence at a time. Legend: `heads.py`; n queries of a block."""

import numpy as np

from nybble.kernels.cpu.tile import LANES
from nybble.models.cpu import band, channels
from nybble.models.cpu.band import BLOCK
from nybble.models.cpu.heads import Heads, Numbers, Tokens, Weights
from nybble.models.cpu.jit import Floats, helper, kernel, sigmoid


@helper
def _keys(
    x: Heads, w: Weights, t: Tokens, s: Numbers, b: int, head: int, made: Floats, notes: Floats
) -> None:
    """made [3, D, padded]: convolved keys, those clipped, and values; notes [3, S]: the keys' factor and
    norm, the values' root."""
    S, D = notes.shape[1], made.shape[1]
    row, at, drive, same = head * D, b * S, head * s.kernel, t.same[b]
    none = np.empty(0, dtype=np.float32)
    channels.convolve(x.k, row, at, S, w.taps_k, row, x.drive_k, drive, same, s.kernel, made[0])
    channels.clip(made[0], 0, 0, S, none, none, s.limit, notes[0], notes[1], made[1])
    channels.convolve(x.v, row, at, S, w.taps_v, row, x.drive_v, drive, same, s.kernel, made[2])
    channels.rms(made[2], S, s.eps, notes[2])


@helper
def _gain(t: Tokens, b: int, c0: int, n: int) -> Floats:
    return t.gain[b, c0 : c0 + n] if t.gain.shape[1] > 0 else t.gain[b, :0]


@helper
def _queries(
    x: Heads, w: Weights, t: Tokens, s: Numbers, b: int, head: int, c0: int, n: int,
    q: Floats, rel: Floats, notes: Floats,
) -> None:  # fmt: skip
    """q [D, BLOCK], times the scale of scores, and rel [R, BLOCK], clipped; notes: each's factor and norm."""
    D, R, at = q.shape[0], rel.shape[0], b * (x.q.shape[1] // t.same.shape[0]) + c0
    gain = _gain(t, b, c0, n)
    channels.clip(x.q, head * D, at, n, w.scale_q[head], gain, s.limit, notes[0], notes[1], q)
    channels.clip(x.rel, head * R, at, n, w.scale_rel[head], gain, s.rel_limit, notes[2], notes[3], rel)
    for i in range(D):
        row = q[i]
        for c in range(n):
            row[c] *= s.scale
        row[n:] = np.float32(0.0)


@helper
def _scores(
    keys: Floats, q: Floats, rel: Floats, w: Weights, t: Tokens, s: Numbers, b: int, c0: int, n: int,
    st: Floats, bias: Floats,
) -> int:  # fmt: skip
    """st: the block's scores; returns its first key."""
    lo = max(0, c0 - s.window + 1)
    band.against_keys(keys, q, c0, n, lo, s.window, st)
    band.add_bias(st, rel, w.proj, c0, n, lo, s.window, bias)
    if t.document.shape[1] > 0:
        band.part_documents(st, t.document[b], c0, n, lo, s.window)
    return lo


@helper
def _rooms(S: int, D: int, R: int, window: int) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """Room for keys and values, their notes, a block's queries, bias weights and notes, and its scores."""
    padded = (S + LANES - 1) // LANES * LANES
    return (
        np.zeros((3, D, padded), dtype=np.float32),
        np.empty((3, S), dtype=np.float32),
        np.zeros((D, BLOCK), dtype=np.float32),
        np.zeros((R, BLOCK), dtype=np.float32),
        np.empty((6, BLOCK), dtype=np.float32),
        np.zeros((min(S, BLOCK + window - 1), BLOCK), dtype=np.float32),
    )


@kernel
def forward(
    first: int,
    last: int,
    x: Heads,
    w: Weights,
    t: Tokens,
    s: Numbers,
    out: Floats,
    lse: Floats,
    gated: Floats,
) -> None:
    (H, D), R, B = w.scale_q.shape, w.proj.shape[1], t.same.shape[0]
    h, S = x.k.shape[0] // D, x.k.shape[1] // B
    made, notes, q, rel, small, st = _rooms(S, D, R, s.window)
    attended, bias = np.empty((D, BLOCK), dtype=np.float32), np.empty(len(w.proj) * BLOCK, dtype=np.float32)
    for item in range(first, last):
        b, key_head = item // h, item % h
        _keys(x, w, t, s, b, key_head, made, notes)
        for head in range(key_head * (H // h), (key_head + 1) * (H // h)):
            for c0 in range(0, S, BLOCK):
                n, at = min(BLOCK, S - c0), b * S + c0
                _queries(x, w, t, s, b, head, c0, n, q, rel, small)
                lo = _scores(made[1], q, rel, w, t, s, b, c0, n, st, bias)
                share, total = small[4], small[5]
                band.softmax(st, x.sink[head, at : at + n], c0, n, lo, s.window, share, total)
                lse[head, at : at + n] = total[:n]
                band.over_keys(made[2], st, c0, n, lo, s.window, attended)
                for i in range(head * D, (head + 1) * D):
                    row, gate = attended[i - head * D], x.gate[i, at : at + n]
                    whole, part = out[i, at : at + n], gated[i, at : at + n]
                    for c in range(n):
                        whole[c] = row[c] * share[c]
                    for c in range(n):
                        part[c] = whole[c] * sigmoid(gate[c])


@helper
def _turned(x: Floats, n: int, out: Floats) -> None:
    """out [n, D] from x [D, n]."""
    for i in range(x.shape[0]):
        row = x[i]
        for c in range(n):
            out[c, i] = row[c]


@kernel
def backward(
    first: int, last: int, dgated: Floats, x: Heads, w: Weights, t: Tokens, s: Numbers, out: Floats,
    lse: Floats, dx: Heads, dw: Weights,
) -> None:  # fmt: skip
    (H, D), R, B = w.scale_q.shape, w.proj.shape[1], t.same.shape[0]
    h, S = x.k.shape[0] // D, x.k.shape[1] // B
    made, notes, q, rel, small, p = _rooms(S, D, R, s.window)
    dst, dq, dout, drel = np.zeros_like(p), np.empty_like(q), np.zeros_like(q), np.zeros_like(rel)
    bias = np.empty(len(w.proj) * BLOCK, dtype=np.float32)
    by_token, rel_by_token = np.empty((BLOCK, D), dtype=np.float32), np.empty((BLOCK, R), dtype=np.float32)
    dkeys, dvalues = np.empty((S, D), dtype=np.float32), np.empty((S, D), dtype=np.float32)
    for item in range(first, last):
        b, key_head = item // h, item % h
        _keys(x, w, t, s, b, key_head, made, notes)
        dkeys[:] = np.float32(0.0)
        dvalues[:] = np.float32(0.0)
        dproj = dw.proj[item]
        dproj[:] = np.float32(0.0)
        for head in range(key_head * (H // h), (key_head + 1) * (H // h)):
            dw.scale_q[b, head] = np.float32(0.0)
            dw.scale_rel[b, head] = np.float32(0.0)
            for c0 in range(0, S, BLOCK):
                n, at = min(BLOCK, S - c0), b * S + c0
                _queries(x, w, t, s, b, head, c0, n, q, rel, small)
                lo = _scores(made[1], q, rel, w, t, s, b, c0, n, p, bias)
                band.probabilities(p, lse[head, at : at + n], c0, n, lo, s.window)
                mean = small[4]
                mean[:] = np.float32(0.0)
                for i in range(head * D, (head + 1) * D):
                    row, gate, grad = out[i, at : at + n], x.gate[i, at : at + n], dgated[i, at : at + n]
                    dgate, to = dx.gate[i, at : at + n], dout[i - head * D]
                    for c in range(n):
                        share = sigmoid(gate[c])
                        to[c] = grad[c] * share
                        dgate[c] = grad[c] * row[c] * share * (np.float32(1.0) - share)
                    for c in range(n):
                        mean[c] += to[c] * row[c]
                    to[n:] = np.float32(0.0)
                dsink, sink, total = (
                    dx.sink[head, at : at + n],
                    x.sink[head, at : at + n],
                    lse[head, at : at + n],
                )
                for c in range(n):
                    dsink[c] = -mean[c] * np.exp(sink[c] - total[c])
                _turned(dout, n, by_token)
                band.onto_keys(p, by_token, c0, n, lo, s.window, dvalues)
                band.against_keys(made[2], dout, c0, n, lo, s.window, dst)
                band.softmax_backward(p, dst, mean, c0, n, lo, s.window)
                _turned(q, n, by_token)
                band.onto_keys(dst, by_token, c0, n, lo, s.window, dkeys)
                band.over_keys(made[1], dst, c0, n, lo, s.window, dq)
                _turned(rel, n, rel_by_token)
                band.bias_backward(dst, rel_by_token, w.proj, c0, n, lo, s.window, bias, drel, dproj)
                for i in range(D):
                    row = dq[i]
                    for c in range(n):
                        row[c] *= s.scale
                gain = _gain(t, b, c0, n)
                channels.clip_backward(
                    dq,
                    x.q,
                    head * D,
                    at,
                    n,
                    w.scale_q[head],
                    gain,
                    small[0],
                    small[1],
                    dx.q,
                    dw.scale_q[b, head],
                )
                channels.clip_backward(
                    drel, x.rel, head * R, at, n, w.scale_rel[head], gain, small[2], small[3],
                    dx.rel, dw.scale_rel[b, head],
                )  # fmt: skip
        _keys_backward(x, w, t, s, b, key_head, made, notes, dkeys, dvalues, dx, dw)


@helper
def _keys_backward(
    x: Heads, w: Weights, t: Tokens, s: Numbers, b: int, head: int, made: Floats, notes: Floats,
    dkeys: Floats, dvalues: Floats, dx: Heads, dw: Weights,
) -> None:  # fmt: skip
    """From the gradients of clipped keys and normalised values [S, D] those of what `_keys` read."""
    S, D = dkeys.shape
    row, at, drive, same = head * D, b * S, head * s.kernel, t.same[b]
    none, grad = np.empty(0, dtype=np.float32), np.empty((D, S), dtype=np.float32)
    back = np.empty((D, S), dtype=np.float32)
    _turned(dkeys, D, grad)
    channels.clip_backward(grad, made[0], 0, 0, S, none, none, notes[0], notes[1], back, none)
    channels.convolve_backward(
        back, x.k, row, at, S, w.taps_k, row, x.drive_k, drive, same, s.kernel, dx.k, dw.taps_k[b], dx.drive_k
    )
    _turned(dvalues, D, grad)
    channels.rms_backward(grad, made[2], S, notes[2])
    channels.convolve_backward(
        grad, x.v, row, at, S, w.taps_v, row, x.drive_v, drive, same, s.kernel, dx.v, dw.taps_v[b], dx.drive_v
    )
