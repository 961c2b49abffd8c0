"""What the updates of a step add up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nybble.rl.mismatch import Mismatch


@dataclass
class Totals:
    """Sums over the updates of a step; they are saved with a checkpoint in the middle of one."""

    mismatch: Mismatch = field(default_factory=Mismatch)
    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    masked: float = 0.0
    kl: float = 0.0
    loss: float = 0.0
    """Sum of the updates' losses."""
    norm: float = 0.0
    """Largest gradient norm."""
    updates: int = 0
    idle: int = 0
    """Updates without a group of unequal rewards, which change nothing."""

    def state(self) -> dict[str, Any]:
        return {**vars(self), "mismatch": dict(vars(self.mismatch))}

    def add(self, other: Totals) -> None:
        """Joins the sums of another rank. What all ranks share stays: loss, norm and the count of updates."""
        for key in ("tokens", "entropy", "clipped", "masked", "kl"):
            setattr(self, key, getattr(self, key) + getattr(other, key))
        mine, theirs = self.mismatch, other.mismatch
        for key in ("tokens", "k3", "ratio", "routed", "rerouted"):
            setattr(mine, key, getattr(mine, key) + getattr(theirs, key))
        mine.ratio_max = max(mine.ratio_max, theirs.ratio_max)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Totals:
        return cls(**{**state, "mismatch": Mismatch(**state["mismatch"])})

    def row(self) -> dict[str, float]:
        """The row of metrics."""
        row: dict[str, float] = {"loss": self.loss, "grad_norm": self.norm, "updates_idle": self.idle}
        if self.tokens:
            row |= {
                "entropy": self.entropy / self.tokens,
                "clip_share": self.clipped / self.tokens,
                "masked_share": self.masked / self.tokens,
                "kl_reference": self.kl / self.tokens,
            }
        return row | self.mismatch.measures()
