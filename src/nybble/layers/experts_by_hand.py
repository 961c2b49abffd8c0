"""A whole layer of routed experts on a CPU whose operands are all FP32, or all rounded to BF16.

Experts are spread over threads; what an expert's rows need stays in the cache of the core that computes them.
Kept for the backward pass: the input, and the first products or not.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width, W width of the first product (2I
with a gate, else I), R = T * k rows, sorted by expert.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from nybble.formats.grouped import group_slices
from nybble.kernels.cpu import rows as passes
from nybble.kernels.cpu.bf16 import rounded
from nybble.kernels.cpu.scratch import room
from nybble.kernels.cpu.threads import each
from nybble.kernels.direct import eager


class Pass(Protocol):
    """An activation as two passes over rows, for CPUs."""

    def forward(self, h: Tensor) -> Tensor:
        """h [R, W] -> [R, I]."""

    def backward(self, h: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of y = w * forward(h): dh [R, W], y [R, I] and dw [R], for dy [R, I] and w [R]."""


def by_hand(x: Tensor) -> bool:
    """Whether passes by hand serve: FP32 on a CPU, where nothing wants to see every operator."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and eager()


class ExpertsByHand(torch.autograd.Function):
    """apply(x [T, H], weights [T, k], first [E, W, H], down [E, H, I], order [R], place [R], ends [E],
    activation, whether operands are rounded to BF16, whether first products are kept) -> [T, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        first: Tensor,
        down: Tensor,
        order: Tensor,
        place: Tensor,
        ends: Tensor,
        act: Pass,
        rounds: bool,
        keeps: bool,
    ) -> Tensor:
        k, operand = weights.shape[1], rounded if rounds else _as_it_is
        x, a, b = operand(x), operand(first), operand(down)
        R, width = len(order), first.shape[1]
        h = x.new_empty(R, width) if keeps else room("first products", R, width)
        rows = passes.gather(x, order, k, room("tokens", R, x.shape[1]))
        y = room("expert rows", R, down.shape[1])

        def expert(e: int, part: slice) -> None:
            torch.mm(rows[part], a[e].T, out=h[part])
            torch.mm(operand(act.forward(h[part])), b[e].T, out=y[part])

        _each(_spans(ends), expert)
        ctx.save_for_backward(x, weights, first, down, order, place, ends, h if keeps else None)
        ctx.act, ctx.rounds = act, rounds
        return passes.combine(y, place, weights, k)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, first, down, order, place, ends, h = ctx.saved_tensors
        k, spans, operand = weights.shape[1], _spans(ends), rounded if ctx.rounds else _as_it_is
        w = weights.reshape(-1)[order]
        a, b, dtoken = operand(first), operand(down), operand(dout)
        again = h is None
        h = room("first products", len(order), first.shape[1]) if again else h
        dfirst, ddown, dw = torch.empty_like(first), torch.empty_like(down), torch.empty_like(w)
        drows, wide = room("expert rows", len(order), x.shape[1]), (len(order), x.shape[1])
        every_row = passes.gather(x, order, k, room("tokens", *wide))
        every_dy = passes.gather(dtoken, order, k, room("gradients", *wide))
        unrounded = passes.gather(dout, order, k, room("unrounded", *wide)) if ctx.rounds else every_dy

        def expert(e: int, part: slice) -> None:
            rows, dy = every_row[part], every_dy[part]
            if again:
                torch.mm(rows, a[e].T, out=h[part])
            dact = torch.mm(dy, b[e])  # of the output before its routing weight
            if ctx.rounds:
                # the operand of wgrad is the rounded product with the routing weight, the other one rounded h
                ones = torch.ones_like(w[part])
                dh, made, _ = ctx.act.backward(h[part], dact * w[part, None], ones)
                made = rounded(made)
                dw[part] = torch.linalg.vecdot(dact, made)
                dy = rounded(unrounded[part] * w[part, None])
            else:
                dh, made, dw[part] = ctx.act.backward(h[part], dact, w[part])
            dh = operand(dh)
            torch.mm(dy.T, made, out=ddown[e])
            torch.mm(dh.T, rows, out=dfirst[e])
            torch.mm(dh, a[e], out=drows[part])

        _each(spans, expert)
        for e in {*range(len(ends))} - {e for e, _ in spans}:
            dfirst[e], ddown[e] = 0.0, 0.0
        dx = passes.combine(drows, place, None, k)
        return dx, dw[place].view_as(weights), dfirst, ddown, None, None, None, None, None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _each(spans: list[tuple[int, slice]], work: Callable[[int, slice], Any]) -> None:
    """Call `work` with every expert that has rows and those rows, the largest first, so that threads end
    together."""
    spans = sorted(spans, key=lambda span: span[1].start - span[1].stop)
    each(lambda i: work(*spans[i]), [part.stop - part.start for _, part in spans])


def _spans(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    return [(e, part) for e, part in enumerate(group_slices(ends)) if part.stop > part.start]
