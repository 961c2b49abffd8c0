"""Experts that are spread over ranks: what `Experts.forward` does in place of computing by itself.

For each pass: sizes are exchanged once, while x is packed; x goes to the ranks of its experts, and beside it
one message of integers with experts, weights and rows; meanwhile the model may compute something else, such
as a shared expert; there it is computed as a batch of its own, and the weighted sums of a rank's experts come
back, one row for each token and rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from nybble import formats
from nybble.kernels import messages
from nybble.layers.experts import Experts
from nybble.layers.operand import Codes
from nybble.layers.weights import Spec
from nybble.parallel.legs import Combine, Dispatch, Trip
from nybble.parallel.routes import Routes, Wanted, routes, wanted
from nybble.parallel.wire import Pending, Wire
from nybble.recipes import Operand, Traffic


@dataclass(frozen=True)
class Exchange:
    """The exchange of one layer."""

    wire: Wire
    traffic: Traffic
    experts_each: int
    """Experts of each rank."""

    def specs(self, up: Spec, down: Spec) -> tuple[Spec, Spec]:
        """The layer's products when x and dy arrive in the formats of their legs: what arrives quantised is
        rounded stochastically along the tokens for wgrad, from the codes of the leg where those are x's
        own; dy whose codes of dgrad wgrad takes is not rounded again."""
        x, dy = up.gemms.wgrad.x, down.gemms.wgrad.dy
        if _quantised(self.traffic.dispatch) and x.quantised:
            source = "forward" if self._takes_codes(up) else x.source
            x = replace(x, source=source, rounding=_stochastic(x))
            up = up._replace(gemms=up.gemms.override({"wgrad.x": x}))
        if _quantised(self.traffic.combine_backward) and dy.quantised and dy.source == "original":
            dy = replace(dy, rounding=_stochastic(dy))
            down = down._replace(gemms=down.gemms.override({"wgrad.dy": dy}))
        return up, down

    def _takes_codes(self, up: Spec) -> bool:
        """Whether the codes of the dispatch leg are the operand of fprop, with an outer scale a token if
        any."""
        leg, x = self.traffic.dispatch, up.gemms.fprop.x
        own = Operand(format=leg, outer="row" if formats.get(leg).two_level else x.outer)
        return _quantised(leg) and x == own and up.gemms.wgrad.x.quantised

    @torch.compiler.disable
    def __call__(
        self,
        experts: Experts,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        """Weighted sums [T, H] of the outputs of each token's experts, wherever those are; x [T, H], index
        int64 [T, k] among the experts of all ranks, weights [T, k], rows int64 [T] or None. `meanwhile` is
        called while x travels."""
        ranks = dist.get_world_size(self.wire.group)
        want = wanted(index, ranks, self.experts_each)
        ones = [1] * ranks
        sizes = self.wire.start("sizes", want.counts, ones, ones)
        layer = experts.specs[0].layer
        key = experts.step_state.keys(x.device)[0]
        rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
        message = messages.pack(x, self.traffic.dispatch)
        way = self._routes(index, want, sizes.wait())
        beside = self._beside(weights, rows, way)
        going = self.wire.start("dispatch", messages.take_rows(message, way.token), way.sent, way.received)
        if meanwhile is not None:
            meanwhile()
        arrived = Arrived.read(beside.wait(), weights.dtype)
        k = index.shape[1]
        trip = Trip(
            wire=self.wire,
            routes=way,
            traffic=self.traffic,
            layer=layer,
            key=key,
            rows=rows,
            arrived_rows=arrived.rows * k + arrived.first,
            dtype=x.dtype,
            keep_codes=self._takes_codes(experts.specs[0]),
        )
        x_here, w_here, *codes = Dispatch.apply(x, weights, going.wait(), arrived.weights, trip)
        as_codes = Codes(*codes) if codes else None
        y = experts.compute(x_here, arrived.experts, w_here, arrived.rows, as_codes)
        out: Tensor = Combine.apply(y, trip)
        return out

    def _routes(self, index: Tensor, want: Wanted, arriving: Tensor) -> Routes:
        with self.wire.monitor.watch.waiting(f"{self.wire.layer}, sizes"):
            sent, received = torch.stack([want.counts, arriving]).tolist()  # the one wait for a GPU
        return routes(index, want, self.experts_each, sent, received)

    def _beside(self, weights: Tensor, rows: Tensor, way: Routes) -> Pending:
        """Rows, first choices, experts and weights of the tokens that go, int32 [S, 2 + 2 k]."""
        token = way.token
        columns = (
            rows[token].unsqueeze(-1),
            way.first.unsqueeze(-1),
            way.experts,
            weights.detach().float()[token].view(torch.int32),
        )
        message = torch.cat([column.to(torch.int32) for column in columns], dim=-1)
        return self.wire.start("routing", message, way.sent, way.received)


def _quantised(leg: str) -> bool:
    return not formats.get(leg).passthrough


def _stochastic(operand: Operand) -> str:
    """Its rounding, unless that is to nearest."""
    return "stochastic" if operand.rounding == "nearest" else operand.rounding


@dataclass(frozen=True, eq=False)
class Arrived:
    """What is known of the N rows that arrive besides their values."""

    rows: Tensor
    """int64 [N], row of the token in the whole batch."""
    first: Tensor
    """int64 [N], its first choice that is an expert here."""
    experts: Tensor
    """int64 [N, k], each choice as an index among the experts here; their number where it is none."""
    weights: Tensor
    """[N, k]."""

    @classmethod
    def read(cls, message: Tensor, dtype: torch.dtype) -> Arrived:
        """From what `_beside` sent; weights in `dtype`."""
        k = message.shape[1] // 2 - 1
        weights = message[:, 2 + k :].clone(memory_format=torch.contiguous_format)
        return cls(
            rows=message[:, 0].long(),
            first=message[:, 1].long(),
            experts=message[:, 2 : 2 + k].long(),
            weights=weights.view(torch.float32).to(dtype),
        )
