"""A whole layer of routed experts on a CPU whose operands are all FP32, or all rounded to BF16.

Experts are spread over threads; what an expert's rows need stays in the cache of the core that computes them.
Kept for the backward pass: the input, and the first products or not.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width, W width of the first product (2I
with a gate, else I), R = T * k rows, sorted by expert.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from nybble.kernels.cpu import rows as passes
from nybble.kernels.cpu.bf16 import rounded
from nybble.kernels.cpu.product import grouped_columns, grouped_rows
from nybble.kernels.cpu.scratch import fresh


class Pass(Protocol):
    """An activation as two passes over rows, for CPUs."""

    def forward(self, h: Tensor) -> Tensor:
        """h [R, W] -> [R, I]."""

    def backward(self, h: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of y = w * forward(h): dh [R, W], y [R, I] and dw [R], for dy [R, I] and w [R]."""


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
        h = fresh(R, width)
        rows = passes.gather(x, order, k, fresh(R, x.shape[1]))
        y = fresh(R, down.shape[1])

        grouped_rows(rows, a, ends, True, h)
        grouped_rows(operand(act.forward(h)), b, ends, True, y)
        ctx.save_for_backward(x, weights, first, down, order, place, ends, h if keeps else None)
        ctx.act, ctx.rounds = act, rounds
        return passes.combine(y, place, weights, k)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, first, down, order, place, ends, h = ctx.saved_tensors
        need_x, _, need_first, need_down = ctx.needs_input_grad[:4]
        k, operand = weights.shape[1], rounded if ctx.rounds else _as_it_is
        w = weights.reshape(-1)[order]
        a, b, dtoken = operand(first), operand(down), operand(dout)
        R, H = len(order), x.shape[1]
        dx = dfirst = ddown = None
        rows = passes.gather(x, order, k, fresh(R, H)) if need_first or h is None else x
        dy = passes.gather(dtoken, order, k, fresh(R, H))
        if h is None:
            h = grouped_rows(rows, a, ends, True, fresh(R, first.shape[1]))
        # of the output before its routing weight
        dact = grouped_rows(dy, b, ends, False, fresh(R, down.shape[2]))
        if ctx.rounds:
            # the operand of wgrad is the rounded product with the routing weight, the other one rounded h
            column, ones = w[:, None], torch.ones_like(w)
            dh, made, _ = ctx.act.backward(h, dact * column, ones)
            made = rounded(made)
            dw = torch.linalg.vecdot(dact, made)
            if need_down:
                dy = rounded(passes.gather(dout, order, k, fresh(R, H)).mul_(column))
        else:
            dh, made, dw = ctx.act.backward(h, dact, w)
        dh = operand(dh)
        if need_down:
            ddown = grouped_columns(dy, made, ends, False, fresh(*down.shape))
        if need_first:
            dfirst = grouped_columns(dh, rows, ends, False, fresh(*first.shape))
        if need_x:
            dx = passes.combine(grouped_rows(dh, a, ends, False, fresh(R, H)), place, None, k)
        return dx, dw[place].view_as(weights), dfirst, ddown, None, None, None, None, None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x
