"""Dispatch and combine: tokens to the ranks of their experts and results back, each leg in its own format.

    forward     dispatch           x[T,H] -> [N,H]        combine             y[N,H] -> sums[T,H]
    backward    dispatch_backward  dx[N,H] -> sums[T,H]   combine_backward    dy[T,H] -> [N,H]

The legs of the backward pass round stochastically. Draws are named by a token's row in the whole batch: a
copy of dy for another rank is the same bytes; partial sums of dx have the row of the token's first expert
there.
Legend: T tokens here, H hidden, k experts a token, S rows sent, N rows received (see `routes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nybble.kernels import messages
from nybble.parallel.routes import Routes
from nybble.parallel.wire import Wire
from nybble.recipes import LEGS, Traffic

FIRST_OPERAND = 16
"""Operand numbers of the legs in draws come behind those of a layer's products."""


@dataclass(frozen=True, eq=False)
class Trip:
    """One pass of one layer: where its tokens go, in which formats."""

    wire: Wire
    routes: Routes
    traffic: Traffic
    layer: int
    """In draws."""
    key: Tensor
    """int64 [4], this pass's own copy."""
    rows: Tensor
    """int64 [T], what each token counts as in draws."""
    arrived_rows: Tensor
    """int64 [N], what each row to return counts as: token * k + the first choice that is an expert here."""
    dtype: torch.dtype
    """Of activations."""
    keep_codes: bool
    """The layer takes the codes of the dispatch leg as they are."""

    def format(self, leg: str) -> str:
        return str(getattr(self.traffic, leg))

    def packed(self, leg: str, x: Tensor, draw_rows: Tensor | None) -> Tensor:
        """x as a message of the leg's format; with `draw_rows` rounded stochastically."""
        name = self.format(leg)
        if draw_rows is None or messages.plain(name):
            return messages.pack(x, name)
        operand = FIRST_OPERAND + LEGS.index(leg)
        return messages.pack(x, name, "stochastic", self.key, self.layer, operand, draw_rows)

    def out(self, leg: str, message: Tensor) -> Tensor:
        """A message [T, bytes] to the ranks of the tokens' experts: [N, bytes]."""
        rows = messages.take_rows(message, self.routes.token)
        return self.wire.start(leg, rows, self.routes.sent, self.routes.received).wait()

    def back(self, leg: str, message: Tensor) -> Tensor:
        """A message [N, bytes] back to where the tokens are: [S, bytes]."""
        return self.wire.start(leg, message, self.routes.received, self.routes.sent).wait()


class Dispatch(torch.autograd.Function):
    """(x [N, H], weights [N, k]) of the rows that arrive; codes, scales and amax behind them if they are
    kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, arrived: Tensor, arrived_weights: Tensor, trip: Trip
    ) -> tuple[Tensor, ...]:
        ctx.trip, ctx.width = trip, x.shape[1]
        ctx.weight_dtype = weights.dtype
        name, width = trip.format("dispatch"), x.shape[1]
        if not trip.keep_codes:
            return messages.unpack(arrived, name, width, trip.dtype), arrived_weights
        # The values are in the codes alone; x is a shape for autograd.
        codes = messages.unpack_codes(arrived, name, width)
        ctx.mark_non_differentiable(*codes)
        return x.new_empty(1).expand(arrived.shape[0], width), arrived_weights, *codes

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dweights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        trip: Trip = ctx.trip
        routes = trip.routes
        back = trip.wire.start("routing_backward", dweights.float(), routes.received, routes.sent)
        message = trip.packed("dispatch_backward", dx, trip.arrived_rows)
        message = trip.back("dispatch_backward", message)
        total = messages.unpack(
            message, trip.format("dispatch_backward"), ctx.width, trip.dtype, routes.places
        )
        # A choice's weight was used by one rank; the others send back zero.
        return total, messages.add_rows(back.wait(), routes.places).to(ctx.weight_dtype), None, None, None


class Combine(torch.autograd.Function):
    """y [N, H] of the rows that arrived -> sums [T, H] in the dtype of activations."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        message = trip.back("combine", trip.packed("combine", y, None))
        return messages.unpack(message, trip.format("combine"), y.shape[1], trip.dtype, trip.routes.places)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        trip: Trip = ctx.trip
        message = trip.out("combine_backward", trip.packed("combine_backward", dy, trip.rows))
        return messages.unpack(message, trip.format("combine_backward"), dy.shape[1], trip.dtype), None
