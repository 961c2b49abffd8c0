"""Backward kernels of attention with a learned relative bias and sinks; legend as in `attend_forward`.

With p the probabilities, dp = dout . v and delta = dout . out, a score's gradient is ds = p * (dp - delta),
which is the gradient of the bias too. Nothing is added by atomics: `queries` owns tiles of queries (dq, drel,
dsink, and what its rows give to the profiles, in chunks of its own that are added up afterwards in one
order), `keys` owns tiles of keys of a key head (dk and dv, over the heads of the group in order).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.models.cuda.skew import LOG2E, by_distance, chunk, put_rows, rows, turn, wall


@triton.jit
def _gradient(score, dp, lse, delta, ok, MASK: tl.constexpr):
    """p and ds of a tile from its scores in base 2; `lse` and `delta` broadcast to it."""
    p = tl.math.exp2(score - lse)
    if MASK:
        p = tl.where(ok, p, 0.0)
    return p, p * (dp - delta)


@triton.jit
def queries(
    q, k, v, rel, bank, sink, segments, first, out, lse, dout,
    dq, drel, dsink, delta, partial,
    S, H, G, lap, chunks, window,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, rb, rs, rh, sb, ss, sh, ob, os, oh, scale,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    FAR: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head, tile of queries); `partial` [tiles, B * H, chunks - 1, T, RP]."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    m = tl.num_programs(1) - 1 - tl.program_id(1)
    i, t = m * T + tl.arange(0, T), tl.arange(0, T)
    k += b * kb + (h // G) * kh
    v += b * vb + (h // G) * vh
    q_tile = rows(q + b * qb + h * qh, m * T, S, qs, T, D, D)
    rel_tile = rows(rel + b * rb + h * rh, m * T, S, rs, T, RP, R)
    dout_tile = rows(dout + b * ob + h * oh, m * T, S, os, T, D, D)
    out_tile = rows(out + (b * S * H + h) * D, m * T, S, H * D, T, D, D)
    own = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    norm = tl.load(lse + (b * H + h) * S + i, mask=i < S, other=0.0)
    tl.store(delta + (b * H + h) * S + i, own, mask=i < S)
    sunk = tl.load(sink + b * sb + i * ss + h * sh, mask=i < S, other=0.0).to(tl.float32) * LOG2E
    at = dsink + (b * S + i) * H + h
    tl.store(at, (-tl.math.exp2(sunk - norm) * own).to(dsink.dtype.element_ty), mask=i < S)
    start = tl.maximum(m * T - window + 1, 0) // T
    now = i
    if DOCUMENTS:
        start = tl.maximum(start, tl.min(tl.load(first + b * S + i, mask=i < S, other=S)) // T)
        now = tl.load(segments + b * S + i, mask=i < S, other=0)
    near = tl.maximum(start, m + 2 - chunks)
    dq_acc = tl.zeros((T, D), tl.float32)
    if FAR:
        for n in range(start, near):
            ok = (m - n) * T + t[:, None] - t[None, :] < window
            if DOCUMENTS:
                ok = ok & (now[:, None] == tl.load(segments + b * S + n * T + t)[None, :])
            k_tile, v_tile = rows(k, n * T, S, ks, T, D, D), rows(v, n * T, S, vs, T, D, D)
            score = tl.dot(q_tile, tl.trans(k_tile)) * (scale * LOG2E)
            dp = tl.dot(dout_tile, tl.trans(v_tile))
            _, ds = _gradient(score, dp, norm[:, None], own[:, None], ok, True)
            dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc)
    drel_acc = tl.zeros((T, RP), tl.float32)
    carried = tl.zeros((T, RP), tl.float32)
    partial += ((m * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (chunks - 1)) * T * RP
    place = t[:, None] * RP + tl.arange(0, RP)[None, :]
    for c in range(m - near + 2, chunks - 1):
        tl.store(partial + c * T * RP + place, carried)
    high = by_distance(rel_tile, chunk(bank, m - near + 1, T, RP), m - near + 1, window, T)
    for n in range(near, m + 1):
        ok = t
        if DOCUMENTS:
            past = tl.load(segments + b * S + n * T + t, mask=n * T + t < S, other=0)
            ok = now[:, None] == past[None, :]
        k_tile, v_tile = rows(k, n * T, S, ks, T, D, D), rows(v, n * T, S, vs, T, D, D)
        low_rows, high_rows = chunk(bank, m - n, T, RP), chunk(bank, m - n + 1, T, RP)
        low = by_distance(rel_tile, low_rows, m - n, window, T)
        bias = tl.gather(tl.where(t[None, :] >= t[:, None], low, high), turn(n * lap, T), 1)
        high = low
        score = tl.dot(q_tile, tl.trans(k_tile)) * (scale * LOG2E) + bias
        dp = tl.dot(dout_tile, tl.trans(v_tile))
        _, ds = _gradient(score, dp, norm[:, None], own[:, None], ok, DOCUMENTS)
        dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc)
        turned = tl.gather(ds, turn(n * lap, T), 1)
        below = tl.where(t[None, :] >= t[:, None], turned, 0.0).to(rel_tile.dtype)
        above = tl.where(t[None, :] >= t[:, None], 0.0, turned).to(rel_tile.dtype)
        drel_acc = tl.dot(below, low_rows, drel_acc)
        drel_acc = tl.dot(above, high_rows, drel_acc)
        carried = tl.dot(tl.trans(above), rel_tile, carried)
        tl.store(partial + (m - n + 1) * T * RP + place, carried, mask=m - n + 2 < chunks)
        carried = tl.dot(tl.trans(below), rel_tile)
    tl.store(partial + place, carried)
    put_rows(dq + (b * S * H + h) * D, dq_acc * scale, m * T, S, H * D, T, D, D)
    put_rows(drel + (b * S * H + h) * R, drel_acc * (1.0 / LOG2E), m * T, S, H * R, T, RP, R)


@triton.jit
def keys(
    q, k, v, rel, bank, segments, last, lse, delta, dout, dk, dv,
    S, H, G, lap, chunks, window, tiles,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, rb, rs, rh, ob, os, oh, scale,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    FAR: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence and key head, tile of keys); tiles of scores lie transposed, keys along rows."""
    heads = H // G
    b = (tl.program_id(0) // heads).to(tl.int64)
    key_head = tl.program_id(0) % heads
    n = tl.program_id(1)
    j, t = n * T + tl.arange(0, T), tl.arange(0, T)
    k_tile = rows(k + b * kb + key_head * kh, n * T, S, ks, T, D, D)
    v_tile = rows(v + b * vb + key_head * vh, n * T, S, vs, T, D, D)
    end = tl.minimum(tiles, (n * T + T + window - 2) // T + 1)
    past = j
    if DOCUMENTS:
        end = tl.minimum(end, tl.max(tl.load(last + b * S + j, mask=j < S, other=0)) // T + 1)
        past = tl.load(segments + b * S + j, mask=j < S, other=0)
    near = tl.minimum(end, n + chunks - 1)
    dk_acc = tl.zeros((T, D), tl.float32)
    dv_acc = tl.zeros((T, D), tl.float32)
    for g in range(G):
        h = key_head * G + g
        q_head, dout_head, rel_head = q + b * qb + h * qh, dout + b * ob + h * oh, rel + b * rb + h * rh
        line = (b * H + h) * S
        for m in range(n, near):
            i = m * T + t
            ok = t
            if DOCUMENTS:
                now = tl.load(segments + b * S + i, mask=i < S, other=0)
                ok = now[None, :] == past[:, None]
            q_tile, dout_tile = rows(q_head, m * T, S, qs, T, D, D), rows(dout_head, m * T, S, os, T, D, D)
            rel_tile = rows(rel_head, m * T, S, rs, T, RP, R)
            norm = tl.load(lse + line + i, mask=i < S, other=0.0)
            own = tl.load(delta + line + i, mask=i < S, other=0.0)
            low = tl.dot(chunk(bank, m - n, T, RP), tl.trans(rel_tile)) + wall(m - n, window, T)[:, None]
            high = (
                tl.dot(chunk(bank, m - n + 1, T, RP), tl.trans(rel_tile))
                + wall(m - n + 1, window, T)[:, None]
            )
            bias = tl.gather(tl.where(t[:, None] >= t[None, :], low, high), tl.trans(turn(m * lap, T)), 0)
            score = tl.dot(k_tile, tl.trans(q_tile)) * (scale * LOG2E) + bias
            dp = tl.dot(v_tile, tl.trans(dout_tile))
            p, ds = _gradient(score, dp, norm[None, :], own[None, :], ok, DOCUMENTS)
            dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc)
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc)
        if FAR:
            for m in range(near, end):
                i = m * T + t
                ok = (m - n) * T + t[None, :] - t[:, None] < window
                if DOCUMENTS:
                    now = tl.load(segments + b * S + i, mask=i < S, other=0)
                    ok = ok & (now[None, :] == past[:, None])
                q_tile, dout_tile = (
                    rows(q_head, m * T, S, qs, T, D, D),
                    rows(dout_head, m * T, S, os, T, D, D),
                )
                norm = tl.load(lse + line + i, mask=i < S, other=0.0)
                own = tl.load(delta + line + i, mask=i < S, other=0.0)
                score = tl.dot(k_tile, tl.trans(q_tile)) * (scale * LOG2E)
                dp = tl.dot(v_tile, tl.trans(dout_tile))
                p, ds = _gradient(score, dp, norm[None, :], own[None, :], ok, True)
                dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc)
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc)
    put_rows(dk + (b * S * heads + key_head) * D, dk_acc * scale, n * T, S, heads * D, T, D, D)
    put_rows(dv + (b * S * heads + key_head) * D, dv_acc, n * T, S, heads * D, T, D, D)
