"""Group-relative advantages and the policy-gradient loss, on plain tensors.

With A the advantage, p the trainer's probability of a token now, p_old the trainer's at the start of the step
and q the sampler's, a token's loss is

    w * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl * k3      r = p / p_old

    w   1, or min(p_old / q, tis) (truncated importance sampling), and 0 where p_old / q is outside the mask
    k3  p_ref / p - 1 - ln(p_ref / p), a non-negative estimate of KL(p || p_ref) from samples of p

and the losses of all tokens of an update are added and divided by one number, so that a token weighs the same
in every micro-batch and on every rank. Legend: n tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nybble.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The objective: GRPO without its standard deviation, unless options say otherwise."""

    updates: int = 1
    """Optimiser updates a step, each on an equal share of the groups."""
    advantage: Literal["mean", "std"] = "mean"
    """mean: reward minus the group's mean. std: divided by the group's standard deviation too, which lifts
    groups that are nearly solved or nearly hopeless (arXiv 2503.20783).
    """
    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high are clipped; 0.28 is "clip higher" (arXiv 2503.14476)."""
    normalise: Literal["tokens", "length"] = "tokens"
    """Divide the sum over tokens by their number, or by completions x max_new_tokens, which does not depend
    on how long they are.
    """
    tis: float = 0.0
    """Cap of the importance weight between trainer and sampler; 0 turns it off."""
    mask_low: float = 0.0
    """Tokens whose ratio of trainer to sampler is below this get no gradient."""
    mask_high: float = math.inf
    """Tokens whose ratio of trainer to sampler is above this get no gradient."""
    kl: float = 0.0
    """Weight of k3 to the model that the run began with; 0 keeps no such model."""
    router_replay: bool = False
    """Train with the experts that the sampler chose."""

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ConfigError(f"updates is {self.updates}; it must be at least 1")
        for name in ("clip_low", "clip_high", "tis", "mask_low", "kl"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.kl == math.inf:
            raise ConfigError("kl is inf; it must be finite")
        if self.clip_low > 1:
            raise ConfigError(f"clip_low is {self.clip_low}; ratios are above 0, so it must be at most 1")
        if not self.mask_low < self.mask_high:
            raise ConfigError("mask_low must be below mask_high")


def advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Advantage of each completion of a group; all 0 if the rewards are equal."""
    mean = math.fsum(rewards) / len(rewards)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    spread = statistics.pstdev(rewards) if kind == "std" else 1.0
    return [(reward - mean) / spread for reward in rewards]


@dataclass(frozen=True)
class TokenLoss:
    """Loss [n] of each token, differentiable, and which of them were clipped or masked [n] bool."""

    loss: Tensor
    clipped: Tensor
    masked: Tensor
    kl: Tensor
    """[n] k3 to the reference, without gradient; zeros if there is none."""


def token_loss(
    logprobs: Tensor,
    old: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    config: LossConfig,
    reference: Tensor | None = None,
) -> TokenLoss:
    """The formula above.

    Args:
        logprobs: [n] ln p, with gradient.
        old: [n] ln p_old.
        sampled: [n] ln q.
        advantage: [n].
        config: see `LossConfig`.
        reference: [n] ln p_ref, or None.
    """
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    clipped = (bounded * advantage < ratio * advantage).detach()
    trust = (old - sampled).exp()
    masked = (trust < config.mask_low) | (trust > config.mask_high)
    weight = trust.clamp(max=config.tis) if config.tis > 0 else torch.ones_like(trust)
    loss = loss * weight.masked_fill(masked, 0.0)
    kl = torch.zeros_like(old)
    if reference is not None:
        k3 = estimate_k3(logprobs, reference)
        loss = loss + config.kl * k3
        kl = k3.detach()
    return TokenLoss(loss, clipped, masked, kl)


def estimate_k3(samples: Tensor, other: Tensor) -> Tensor:
    """p_other / p - 1 - ln(p_other / p) of tokens drawn from p, given both logarithms [n]: at least 0, and in
    the mean KL(p || p_other)."""
    difference = other - samples
    return difference.expm1() - difference
