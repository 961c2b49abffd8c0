"""The gradient of a finished block that many mixtures read, added once, when the last of them is known.

Legend: T tokens, H hidden. A mixture i passes on the gradient d_i [T, H] behind its sum over sources, and for
each source j and token the weight w and the score's gradient c; then
    d source_j = sum over mixtures of (w * d_i + c * query_i / sqrt(H))
Adding to that in memory, mixture after mixture, would read and write FP32 each time, or round each time.

So what autograd passes on is a tensor without memory, whose attribute holds the terms so far; each mixture
returns a new one. A stand-in has one reader, the next mixture, so autograd hands over that very object, and
torch keeps a tensor's Python object while C++ holds the tensor. Where it would make another one, for a second
reader or by a hook, the attribute is missing, and that is an error, never a part of a gradient.
"""
# mypy: ignore-errors

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.tiles import empty_like, tile

ROWS = 2
"""Tokens of a tile that share what it reads of the queries."""

FLIGHT = 4
"""Terms that are on their way at once."""

MOST = 32
"""Terms that one kernel adds."""


class Term(NamedTuple):
    """What a mixture tells a block that it read."""

    d: Tensor
    """Gradient of the mixture before its norm [..., H]."""
    shares: Tensor
    """FP32 [2, T]: the block's weight and the gradient of its score."""
    query: Tensor
    """[H]."""
    root: float
    """What the score divides the product with the query by, inverted."""


@triton.jit(do_not_specialize=["T"])
def block_backward(
    d_ptrs, share_ptrs, query_ptrs, x_ptr, more_ptr, dx_ptr, T, root, eps,
    MORE: tl.constexpr, LAST: tl.constexpr, FLIGHT: tl.constexpr,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT))[:, None]
    h = tl.arange(0, BH)[None, :]
    mask = (t < T) & (h < H)
    at = t * H + h
    total = tl.zeros((BT, BH), tl.float32)
    if MORE:
        total += tl.load(more_ptr + at, mask=mask, other=0.0)
    for i in tl.static_range(len(d_ptrs)):
        d = tl.load(d_ptrs[i] + at, mask=mask, other=0.0).to(tl.float32)
        query = tl.load(query_ptrs[i] + h, mask=h < H, other=0.0).to(tl.float32) * root
        weight = tl.load(share_ptrs[i] + t, mask=t < T, other=0.0)
        dscore = tl.load(share_ptrs[i] + T + t, mask=t < T, other=0.0)
        total += d * weight + query * dscore
        if i % FLIGHT == FLIGHT - 1:
            tl.debug_barrier()  # else all terms are loaded at once, into more registers than there are
    if LAST:
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + eps)
        x = x * rstd
        total = (total - x * (tl.sum(total * x, 1, keep_dims=True) / H)) * rstd
    tl.store(dx_ptr + at, total.to(dx_ptr.dtype.element_ty), mask=mask)


class StandIn(torch.autograd.Function):
    """Block [..., H] -> a tensor of its shape without memory, which stands for its RMS norm in the graph.

    Mixtures read the block itself. What goes back through the graph has no memory either: it holds the terms
    of all mixtures so far, see `gradient`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        left, more, H = list(terms(g)), None, x.shape[-1]
        T = x.numel() // H
        _, BH, warps = tile(H)
        while True:
            some, left = left[:MOST], left[MOST:]
            dx = empty_like(x, torch.float32 if left else x.dtype)
            if T:
                block_backward[(triton.cdiv(T, ROWS),)](
                    tuple(s.d for s in some), tuple(s.shares for s in some), tuple(s.query for s in some),
                    x, more, dx, T, some[0].root, ctx.eps, more is not None, not left, FLIGHT, H, ROWS, BH,
                    num_warps=warps, enable_fp_fusion=True,
                )  # fmt: skip
            if not left:
                return dx, None
            more = dx


def gradient(stand_in: Tensor, later: Tensor | None, *own: Term) -> Tensor:
    """The gradient of a stand-in: the terms of later mixtures and a mixture's own."""
    # one number, expanded: nothing that autograd would add to in place, which could keep the attribute
    g = stand_in.detach()[(slice(1),) * stand_in.dim()].expand(stand_in.shape)
    g.terms = (*(() if later is None else terms(later)), *own)
    return g


def terms(g: Tensor) -> tuple[Term, ...]:
    """Of the gradient of a stand-in; RuntimeError if it is another tensor than a mixture returned."""
    found = getattr(g, "terms", None)
    if found is None:
        raise RuntimeError(
            "the gradient of a finished block came without the terms of its mixtures: a block must go from "
            "one mixture to the next, each of which hands it on, and no hook may replace its gradient"
        )
    return found
