"""An attention layer of Inkling 2 on a CPU as one operation: products, and between them one pass a direction.

Projections of the same input are one product, whose result lies by channel, as `cpu.attention` takes it. Kept
for the backward pass: the inputs, what the projections gave, the attended values before and behind their
gates, and one number a query and head.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nybble.kernels.cpu.bf16 import rounded
from nybble.kernels.cpu.product import matmul
from nybble.kernels.cpu.scratch import fresh
from nybble.models.context import Context
from nybble.models.cpu import attention as fused
from nybble.models.cpu import heads
from nybble.models.cpu.heads import Heads, Numbers, Tokens, Weights, arrays

T = TypeVar("T")
SMALL = len(Weights._fields)


class Plan(NamedTuple):
    """What the layer needs besides tensors."""

    groups: tuple[int, ...]
    """How many projections take each input: of all, or of queries, keys and values."""
    tokens: Tokens
    numbers: Numbers
    rounds: bool
    """Whether operands of products are rounded to BF16."""

    def operand(self, x: Tensor) -> Tensor:
        """x as an operand of a product."""
        return rounded(x) if self.rounds else x


class WholeAttention(torch.autograd.Function):
    """apply(plan, *inputs [T, hidden], *small tensors in the order of `Weights`, *weights of the projections
    in the order of `Heads`, weight of the output) -> [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        inputs, small, projections, output = _split(plan, tensors)
        operands = [plan.operand(x) for x in inputs]
        made: list[Tensor] = []
        for x, weights in zip(operands, _grouped(projections, plan.groups), strict=True):
            whole = fresh(sum(len(w) for w in weights), len(x))
            made += matmul(plan.operand(torch.cat(weights)), x.T, whole).split([len(w) for w in weights])
        out, lse, gated = fused.forward(_heads(made), _weights(small), plan.tokens, plan.numbers)
        gated = plan.operand(gated)
        ctx.save_for_backward(*operands, *tensors[len(inputs) :], *made, out, lse, gated)
        ctx.plan = plan
        return matmul(gated.T, plan.operand(output).T, fresh(gated.shape[1], len(output)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        inputs, small, projections, output = _split(plan, saved[: len(needs)])
        need_inputs, _, need_projections, need_output = _split(plan, needs)
        *made, out, lse, gated = saved[len(needs) :]
        dy = plan.operand(dy)
        groups = _grouped(projections, plan.groups)
        wholes = [fresh(sum(len(w) for w in weights), len(dy)) for weights in groups]
        dmade = [
            d for whole, ws in zip(wholes, groups, strict=True) for d in whole.split([len(w) for w in ws])
        ]
        dgated = matmul(plan.operand(output).T, dy.T, fresh(*gated.shape))
        dsmall = _backward(dgated, plan, made, small, out, lse, dmade)
        dinputs: list[Tensor | None] = []
        dprojections: list[Tensor | None] = []
        needed = zip(need_inputs, _grouped(need_projections, plan.groups), strict=True)
        for (need_x, need_weights), x, whole, weights in zip(needed, inputs, wholes, groups, strict=True):
            d, dx = plan.operand(whole), None
            if need_x:
                dx = matmul(d.T, plan.operand(torch.cat(weights)), fresh(*x.shape))
            dinputs.append(dx)
            if any(need_weights):
                dprojections += matmul(d, x, fresh(len(d), x.shape[1])).split([len(w) for w in weights])
            else:
                dprojections += [None] * len(weights)
        doutput = matmul(dy.T, gated.T, fresh(*output.shape)) if need_output else None
        return None, *dinputs, *dsmall, *dprojections, doutput


class AttentionBetween(torch.autograd.Function):
    """The same between the products: apply(plan, *small tensors in the order of `Weights`, *what the
    projections gave [T, rows] in the order of `Heads`) -> gated values [T, H * D]."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        small, made = tensors[:SMALL], [y.T.contiguous() for y in tensors[SMALL:]]
        out, lse, gated = fused.forward(_heads(made), _weights(small), plan.tokens, plan.numbers)
        ctx.save_for_backward(*small, *made, out, lse)
        ctx.plan = plan
        return gated.T.contiguous()

    @staticmethod
    def backward(ctx: Any, dgated: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        small, made = tuple(tensors[:SMALL]), tensors[SMALL:]
        dmade = [torch.empty_like(y) for y in made]
        dsmall = _backward(dgated.T.contiguous(), ctx.plan, made, small, out, lse, dmade)
        return None, *dsmall, *(d.T.contiguous() for d in dmade)


def _backward(
    dgated: Tensor,
    plan: Plan,
    made: list[Tensor],
    small: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    dmade: list[Tensor],
) -> tuple[Tensor, ...]:
    """Fills dmade, and returns the gradients of the small tensors."""
    dq, drel, dproj, *dtaps = fused.backward(
        dgated, _heads(made), _weights(small), plan.tokens, plan.numbers, out, lse, _heads(dmade)
    )
    return dq, drel, dproj.T, *dtaps


def _split(plan: Plan, all_: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...], T]:
    """What belongs to inputs, small tensors, weights of projections and the weight of the output."""
    n = len(plan.groups)
    return all_[:n], all_[n : n + SMALL], all_[n + SMALL : -1], all_[-1]


def _grouped(projections: tuple[T, ...], groups: tuple[int, ...]) -> list[tuple[T, ...]]:
    """What belongs to the weights that share an input, for each input."""
    parts, at = [], 0
    for count in groups:
        parts.append(projections[at : at + count])
        at += count
    return parts


def _weights(small: tuple[Tensor, ...]) -> Weights:
    scale_q, scale_rel, proj, *taps = small
    return arrays(Weights, (scale_q, scale_rel, proj.T, *taps))


def _heads(made: list[Tensor]) -> Heads:
    """Of six projections, or of eight where convolutions have computed taps."""
    if len(made) == len(Heads._fields):
        return arrays(Heads, made)
    q, gate, rel, sink, k, v = made
    none = q.new_empty(0, q.shape[1])
    return arrays(Heads, (q, gate, rel, sink, k, none, v, none))


def tokens(context: Context, B: int, S: int, gain: Tensor | None) -> Tokens:
    """What the pass knows of the tokens of `context`."""
    return heads.tokens(B, S, context.segments, context.same, gain)
