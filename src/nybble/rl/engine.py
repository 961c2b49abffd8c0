"""Who samples: an engine completes requests under the weights of its last refresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nybble.rl.policy import Policy
from nybble.rl.sampler import Completion, Request, SamplingParams, sample


class Engine(Protocol):
    """Raises EngineError if it cannot do what it is asked."""

    def refresh(self, update: int) -> None:
        """From now on, sample with the policy after `update` updates."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[Completion]:
        """Completes each request; `version` is part of what names the draws."""
        ...


class OwnEngine:
    """The model in this process, in the precision of the recipe's sampling stage."""

    def __init__(self, policy: Policy, stop: frozenset[int]) -> None:
        self.policy, self.stop = policy, stop

    def refresh(self, update: int) -> None:
        self.policy.begin_sampling(update)

    def sample(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[Completion]:
        return sample(
            self.policy.model, requests, params, self.stop, version=version, invariant=self.policy.invariant
        )
