"""One message to every rank of a group and one from each, measured and watched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from nybble.errors import ExchangeError
from nybble.parallel.traffic import Meter
from nybble.parallel.watch import Watch


@dataclass(frozen=True)
class Monitor:
    """What the exchanges of a model report to."""

    meter: Meter = field(default_factory=Meter)
    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True)
class Wire:
    """The exchanges of one layer over one group of ranks."""

    group: dist.ProcessGroup
    monitor: Monitor
    layer: str
    """Named in reports."""

    def start(self, leg: str, message: Tensor, sent: list[int], received: list[int]) -> Pending:
        """Sends `sent[p]` rows of `message` to rank p, the first ones to the first; `received[p]` come."""
        here = dist.get_rank(self.group)
        out = message.new_empty(sum(received), *message.shape[1:])
        row = message[0].nbytes if len(message) else 0
        self.monitor.meter.sent(leg, row * (sum(sent) - sent[here]))
        try:
            work = dist.all_to_all_single(
                out, message.contiguous(), received, sent, group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise self.fault(leg, error) from error
        return Pending(self, leg, out, work)

    def fault(self, leg: str, error: BaseException) -> ExchangeError:
        """The error of an exchange that failed, with its place."""
        return ExchangeError(
            f"rank {dist.get_rank()}: step {self.monitor.watch.step}, {self.layer}, {leg}: "
            f"the exchange failed, so another rank is gone or late: {error}"
        )


@dataclass(frozen=True)
class Pending:
    """An exchange under way."""

    wire: Wire
    leg: str
    out: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """What arrived, by sending rank. On a GPU the stream waits, not the host."""
        monitor, device = self.wire.monitor, self.out.device
        place = f"{self.wire.layer}, {self.leg}"
        try:
            with monitor.watch.waiting(place, device), monitor.meter.waiting(self.leg, device):
                self.work.wait()
        except RuntimeError as error:
            raise self.wire.fault(self.leg, error) from error
        return self.out
