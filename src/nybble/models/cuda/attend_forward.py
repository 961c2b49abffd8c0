"""Forward kernel of attention with a learned relative bias and sinks (`models.inkling2.attend`).

One program computes a tile of T queries of one head and goes over the tiles of keys that it reaches, with the
running softmax of FlashAttention in base 2 (arXiv 2205.14135); the sink is where the running maximum starts,
so no row is ever empty. Tiles beyond the extent of the bias skip it.

Legend: B sequences, S tokens, H heads, G of them a key head, D head size, R weights of profiles (RP padded).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nybble.models.cuda.skew import LOG2E, by_distance, chunk, put_rows, rows, turn


@triton.jit
def _step(q, k_tile, v_tile, bias, ok, best, total, acc, scale, MASK: tl.constexpr):
    """Take one tile of keys into the running softmax."""
    score = tl.dot(q, tl.trans(k_tile)) * (scale * LOG2E) + bias
    if MASK:
        score = tl.where(ok, score, float("-inf"))
    higher = tl.maximum(best, tl.max(score, 1))
    shrink = tl.math.exp2(best - higher)
    p = tl.math.exp2(score - higher[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def forward(
    q, k, v, rel, bank, sink, segments, first, out, lse,
    S, H, G, lap, chunks, window,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, rb, rs, rh, sb, ss, sh, scale,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    FAR: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head, tile of queries, the last first: they have the most keys)."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    m = tl.num_programs(1) - 1 - tl.program_id(1)
    i, t = m * T + tl.arange(0, T), tl.arange(0, T)
    k += b * kb + (h // G) * kh
    v += b * vb + (h // G) * vh
    q_tile = rows(q + b * qb + h * qh, m * T, S, qs, T, D, D)
    rel_tile = rows(rel + b * rb + h * rh, m * T, S, rs, T, RP, R)
    best = tl.load(sink + b * sb + i * ss + h * sh, mask=i < S, other=0.0).to(tl.float32) * LOG2E
    total = tl.full((T,), 1.0, tl.float32)
    acc = tl.zeros((T, D), tl.float32)
    start = tl.maximum(m * T - window + 1, 0) // T
    now = i
    if DOCUMENTS:
        start = tl.maximum(start, tl.min(tl.load(first + b * S + i, mask=i < S, other=S)) // T)
        now = tl.load(segments + b * S + i, mask=i < S, other=0)
    near = tl.maximum(start, m + 2 - chunks)
    if FAR:
        for n in range(start, near):
            ok = (m - n) * T + t[:, None] - t[None, :] < window
            if DOCUMENTS:
                ok = ok & (now[:, None] == tl.load(segments + b * S + n * T + t)[None, :])
            k_tile, v_tile = rows(k, n * T, S, ks, T, D, D), rows(v, n * T, S, vs, T, D, D)
            best, total, acc = _step(q_tile, k_tile, v_tile, 0.0, ok, best, total, acc, scale, True)
    high = by_distance(rel_tile, chunk(bank, m - near + 1, T, RP), m - near + 1, window, T)
    for n in range(near, m + 1):
        ok = t
        if DOCUMENTS:
            past = tl.load(segments + b * S + n * T + t, mask=n * T + t < S, other=0)
            ok = now[:, None] == past[None, :]
        k_tile, v_tile = rows(k, n * T, S, ks, T, D, D), rows(v, n * T, S, vs, T, D, D)
        low = by_distance(rel_tile, chunk(bank, m - n, T, RP), m - n, window, T)
        bias = tl.gather(tl.where(t[None, :] >= t[:, None], low, high), turn(n * lap, T), 1)
        high = low
        best, total, acc = _step(q_tile, k_tile, v_tile, bias, ok, best, total, acc, scale, DOCUMENTS)
    put_rows(out + (b * S * H + h) * D, acc / total[:, None], m * T, S, H * D, T, D, D)
    tl.store(lse + (b * H + h) * S + i, best + tl.math.log2(total), mask=i < S)
