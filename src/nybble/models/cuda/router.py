"""Sigmoid router in one pass: logits, the k experts of a token by biased score, their weights.

Legend: T tokens, H hidden, E experts, k experts a token.
    s = sigmoid(x @ W.T)      weight[j] = gain * s[e_j] / (sum over the chosen of s + 1e-20)
Tensor cores multiply BF16. Numbers in FP32 go to them as three BF16 parts, which hold all of their 24 bits:
products are exact, and only sums are rounded, to FP32.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.kernels.cuda.jit import INTERPRETED
from nybble.models.cuda.sums import add
from nybble.models.cuda.tiles import empty_like

BLOCK_H, WARPS = 64, 4
TINY = tl.constexpr(1e-20)


FACTOR = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)
"""What factors of products are held in: the interpreter multiplies no BF16."""


@triton.jit
def _parts(x):
    """Three BF16 whose sum is x."""
    a = x.to(tl.bfloat16)
    rest = x - a.to(tl.float32)
    b = rest.to(tl.bfloat16)
    c = (rest - b.to(tl.float32)).to(tl.bfloat16)
    return a.to(FACTOR), b.to(FACTOR), c.to(FACTOR)


@triton.jit(do_not_specialize=["T"])
def router_forward(
    x_ptr, weight_ptr, bias_ptr, logit_ptr, chosen_ptr, out_ptr, T, gain, E: tl.constexpr, H: tl.constexpr,
    k: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside, real = (t < T)[:, None], (e < E)[None, :]
    logits = tl.zeros((BT, BE), tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        x = tl.load(x_ptr + t[:, None] * H + h[None, :], mask=inside & (h < H)[None, :], other=0.0).to(FACTOR)
        w = tl.load(weight_ptr + e[None, :] * H + h[:, None], mask=real & (h < H)[:, None], other=0.0)
        a, b, c = _parts(w.to(tl.float32))
        logits = tl.dot(x, c, logits)
        logits = tl.dot(x, b, logits)
        logits = tl.dot(x, a, logits)
    tl.store(logit_ptr + t[:, None] * E + e[None, :], logits, mask=inside & real)
    scores = tl.sigmoid(logits)
    biased = scores + tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    biased = tl.where(biased == biased, biased, -1e30)  # NaN is chosen last, and by no expert twice
    biased = tl.where(real, biased, float("-inf"))
    kept = ()
    total = tl.zeros((BT,), tl.float32)
    for j in tl.static_range(k):
        best = tl.argmax(biased, 1)
        hit = e[None, :] == best[:, None]
        score = tl.sum(tl.where(hit, scores, 0.0), 1)
        tl.store(chosen_ptr + t * k + j, best.to(tl.int64), mask=t < T)
        biased = tl.where(hit, float("-inf"), biased)
        kept = kept + (score,)
        total += score
    _weigh(kept, total, out_ptr, t, T, gain, k)


@triton.jit
def _weigh(kept, total, out_ptr, t, T, gain, k: tl.constexpr):
    for j in tl.static_range(k):
        tl.store(out_ptr + t * k + j, kept[j] / (total + TINY) * gain, mask=t < T)


@triton.jit(do_not_specialize=["T"])
def weigh_given(
    logit_ptr, chosen_ptr, out_ptr, T, gain, E: tl.constexpr, k: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    kept = ()
    total = tl.zeros((BT,), tl.float32)
    for j in tl.static_range(k):
        own = tl.load(chosen_ptr + t * k + j, mask=t < T, other=0)
        score = tl.sigmoid(tl.load(logit_ptr + t * E + own, mask=t < T, other=0.0))
        kept = kept + (score,)
        total += score
    _weigh(kept, total, out_ptr, t, T, gain, k)


@triton.jit(do_not_specialize=["T"])
def router_backward(
    dlogit_ptr, dout_ptr, x_ptr, weight_ptr, logit_ptr, chosen_ptr, dx_ptr, dweight_ptr, T, gain,
    E: tl.constexpr, H: tl.constexpr, k: tl.constexpr, LOGITS: tl.constexpr, OUT: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Partial sums of the weight's gradient go to row program_id(0) of [programs, E, H]."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside, real = (t < T)[:, None], (e < E)[None, :]
    d = tl.zeros((BT, BE), tl.float32)
    if LOGITS:
        d += tl.load(dlogit_ptr + t[:, None] * E + e[None, :], mask=inside & real, other=0.0)
    if OUT:
        total = tl.zeros((BT,), tl.float32) + TINY
        along = tl.zeros((BT,), tl.float32)
        for j in tl.static_range(k):
            own = tl.load(chosen_ptr + t * k + j, mask=t < T, other=0)
            s = tl.sigmoid(tl.load(logit_ptr + t * E + own, mask=t < T, other=0.0))
            total += s
            along += s * tl.load(dout_ptr + t * k + j, mask=t < T, other=0.0)
        for j in tl.static_range(k):
            own = tl.load(chosen_ptr + t * k + j, mask=t < T, other=0)
            s = tl.sigmoid(tl.load(logit_ptr + t * E + own, mask=t < T, other=0.0))
            ds = gain / total * (tl.load(dout_ptr + t * k + j, mask=t < T, other=0.0) - along / total)
            d += tl.where(e[None, :] == own[:, None], (ds * s * (1.0 - s))[:, None], 0.0)
    a, b, c = _parts(d)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        x_at = t[:, None] * H + h[None, :]
        x = tl.load(x_ptr + x_at, mask=inside & (h < H)[None, :], other=0.0).to(FACTOR)
        w_at = e[:, None] * H + h[None, :]
        there = (e < E)[:, None] & (h < H)[None, :]
        dw = tl.dot(tl.trans(c), x)
        dw = tl.dot(tl.trans(b), x, dw)
        dw = tl.dot(tl.trans(a), x, dw)
        tl.store(dweight_ptr + tl.program_id(0) * E * H + w_at, dw, mask=there)
        # dx is rounded to BF16: products below 2^-16 of the largest do not matter
        p, q, _ = _parts(tl.load(weight_ptr + w_at, mask=there, other=0.0).to(tl.float32))
        dx = tl.dot(b, p)
        dx = tl.dot(a, q, dx)
        dx = tl.dot(a, p, dx)
        tl.store(dx_ptr + x_at, dx.to(dx_ptr.dtype.element_ty), mask=inside & (h < H)[None, :])


class Route(torch.autograd.Function):
    """x BF16 [T, H], weight [E, H], bias [E] -> logits FP32 [T, E], weights FP32 [T, k], experts int64
    [T, k], the highest score first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, k: int, gain: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        (T, H), E = x.shape, weight.shape[0]
        logits = torch.empty(T, E, dtype=torch.float32, device=x.device)
        out = torch.empty(T, k, dtype=torch.float32, device=x.device)
        chosen = torch.empty(T, k, dtype=torch.int64, device=x.device)
        BT, BE = _tile(E, 64)
        if T:
            router_forward[(triton.cdiv(T, BT),)](
                x,
                weight,
                bias,
                logits,
                chosen,
                out,
                T,
                gain,
                E,
                H,
                k,
                BT,
                BE,
                BLOCK_H,
                num_warps=WARPS,
                enable_fp_fusion=True,
            )
        ctx.save_for_backward(x, weight, logits, chosen)
        ctx.gain = gain
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return logits, out, chosen

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor | None, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, weight, logits, chosen = ctx.saved_tensors
        (T, H), E, k = x.shape, weight.shape[0], chosen.shape[1]
        dlogits = None if dlogits is None else dlogits.contiguous()
        dout = None if dout is None else dout.contiguous()
        dx = empty_like(x)
        BT, BE = _tile(E, 128)
        programs = triton.cdiv(T, BT)
        sums = torch.empty(1, programs, E, H, dtype=torch.float32, device=x.device)
        if T:
            router_backward[(programs,)](
                dlogits, dout, x, weight, logits, chosen, dx, sums, T, ctx.gain, E, H, k,
                dlogits is not None, dout is not None, BT, BE, BLOCK_H,
                num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        return dx, add(sums, weight.dtype)[0], None, None, None


def weigh(logits: Tensor, chosen: Tensor, gain: float) -> Tensor:
    """Weights [T, k] of experts int64 [T, k], to the bit those of `Route` where it chose the same; without
    gradient."""
    logits, chosen = logits.detach().contiguous(), chosen.contiguous()
    out = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    (T, k), BT = chosen.shape, 128
    if T:
        weigh_given[(triton.cdiv(T, BT),)](
            logits, chosen, out, T, gain, logits.shape[1], k, BT, num_warps=WARPS, enable_fp_fusion=True
        )
    return out


def _tile(experts: int, tokens: int) -> tuple[int, int]:
    """(tokens, experts) of a tile, for about 4096 scores."""
    wide = max(16, triton.next_power_of_2(experts))
    return max(16, min(tokens, 4096 // wide)), wide
