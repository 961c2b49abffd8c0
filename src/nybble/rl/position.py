"""Where a run stands besides its weights: what the session saves in place of a position in data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nybble import together
from nybble.rl.totals import Totals
from nybble.rl.update import Old


@dataclass
class Position:
    """The next problem, and how far the step in progress is."""

    problem: int = 0
    """Index of the first problem of the step in progress."""
    update: int = 0
    """Updates of the step in progress that are done."""
    totals: Totals = field(default_factory=Totals)
    evaluated: dict[str, float] = field(default_factory=dict)
    """What the first policy's evaluation found, until the first step's row takes it."""
    old: Old | None = None
    """Log-probabilities at the start of the step in progress, if it has several updates."""

    def __next__(self) -> dict[str, Tensor]:
        raise StopIteration  # batches of tokens come from rollouts, not from here

    def state_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "update": self.update,
            "totals": self.totals.state(),
            "evaluated": self.evaluated,
            "old": self.old if self.update else None,
        }

    def join(self) -> None:
        """Brings what the ranks know of the step in progress to the first, which saves it for all."""
        for rank, (totals, old) in enumerate(together.gather((self.totals.state(), self.old))):
            if rank != together.rank():
                self.totals.add(Totals.of(totals))
                self.old = None if self.old is None or old is None else self.old | old

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.problem, self.update, self.old = state["problem"], state["update"], state["old"]
        self.totals, self.evaluated = Totals.of(state["totals"]), state["evaluated"]
        if not together.is_main():  # the first rank has the sums of all
            self.totals = Totals()
