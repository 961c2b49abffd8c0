"""How far the trainer's probabilities are from the sampler's, measured on every token of every step.

With d = ln p_trainer - ln q_sampler of a sampled token: k3 = e^d - 1 - d estimates KL(q || p); its mean, the
mean of e^|d|, and the largest ratio either way are 0, 1 and 1 when both compute the same function.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.errors import ConfigError
from nybble.rl.batching import MicroBatch
from nybble.rl.loss import estimate_k3


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Mismatch of trainer and sampler above which a step warns."""

    warn_k3: float = 1e-3
    """Mean k3, nats."""
    warn_ratio: float = 2.0
    """Largest ratio of the two probabilities of a token, either way."""
    warn_experts: float = 0.05
    """Share of tokens that went to other experts in at least one layer."""

    def __post_init__(self) -> None:
        for name in ("warn_k3", "warn_ratio", "warn_experts"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass
class Mismatch:
    """Sums over tokens, so that parts of a step can be added; `measures` gives the means."""

    tokens: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    """Sum of e^|d|."""
    ratio_max: float = 1.0
    routed: float = 0.0
    """Tokens, prompts included, whose experts both sides know."""
    rerouted: float = 0.0

    def add(self, trainer: Tensor, sampler: Tensor) -> None:
        """Counts tokens by their log-probabilities [n] on both sides."""
        d = (trainer.detach() - sampler).double()
        ratios = d.abs().exp()
        self.tokens += d.numel()
        self.k3 += float(estimate_k3(sampler.double(), trainer.detach().double()).sum())
        self.ratio += float(ratios.sum())
        self.ratio_max = max(self.ratio_max, float(ratios.max()) if d.numel() else 1.0)

    def add_routing(self, batch: MicroBatch, experts: Tensor | None) -> None:
        """Counts tokens whose set of experts differs in any layer; `experts` are the trainer's [T, L, k]."""
        if batch.experts is None or experts is None:
            return
        known = batch.experts[:, 0, 0] >= 0
        theirs = batch.experts[known].sort(-1).values
        ours = experts[known].sort(-1).values
        self.routed += float(known.sum())
        self.rerouted += float((theirs != ours).flatten(1).any(1).sum())

    def measures(self) -> dict[str, float]:
        """The row of metrics; without a token nothing is known, and the row is empty."""
        if not self.tokens:
            return {}
        row = {
            "mismatch_k3": self.k3 / self.tokens,
            "mismatch_ratio_mean": self.ratio / self.tokens,
            "mismatch_ratio_max": self.ratio_max,
        }
        if self.routed:
            row["mismatch_experts"] = self.rerouted / self.routed
        return row

    def warnings(self, config: WatchConfig) -> list[str]:
        """A sentence for each threshold that is exceeded."""
        row = self.measures()
        limits = (
            ("mismatch_k3", config.warn_k3, "k3 between sampler and trainer"),
            ("mismatch_ratio_max", config.warn_ratio, "the largest ratio of trainer to sampler"),
            ("mismatch_experts", config.warn_experts, "the share of tokens whose experts differ"),
        )
        return [
            f"{what} is {row[name]:.3g}, above {limit:g}"
            for name, limit, what in limits
            if row.get(name, 0.0) > limit
        ]
