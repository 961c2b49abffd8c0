"""One optimiser update on the rollouts of some groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nybble import together
from nybble.errors import NonFiniteError
from nybble.models import CausalLM
from nybble.pretrain.guard import locate
from nybble.pretrain.schedule import lr_factor
from nybble.pretrain.session import Session
from nybble.rl.batching import MicroBatch, micro_batches
from nybble.rl.config import RLConfig
from nybble.rl.forward import score
from nybble.rl.loss import advantages, token_loss
from nybble.rl.policy import Policy
from nybble.rl.rollout import Rollout
from nybble.rl.totals import Totals

Old = dict[str, list[float]]
"""ln p of the tokens of each completion at the start of a step, by its name."""


def name(rollout: Rollout) -> str:
    """Of a completion within its step."""
    return f"{rollout.problem}/{rollout.sample}"


def _compare(totals: Totals, batch: MicroBatch, logprobs: Tensor, experts: Tensor | None) -> None:
    """Measures the trainer against the sampler, whose policy it must still be."""
    totals.mismatch.add(logprobs, batch.sampled)
    totals.mismatch.add_routing(batch, experts)


def _gather(batch: MicroBatch, old: Old) -> Tensor:
    """[n], in the order of the micro-batch."""
    values = [p for rollout in batch.rollouts for p in old[name(rollout)]]
    return torch.tensor(values, dtype=torch.float32, device=batch.sampled.device)


@dataclass(frozen=True)
class Weighted:
    """A rollout with its advantage."""

    rollout: Rollout
    advantage: float


def weigh(groups: Sequence[Sequence[Rollout]], kind: str) -> list[Weighted]:
    """Every rollout with a reward, and its advantage among those of its group."""
    out: list[Weighted] = []
    for group in groups:
        scored = [rollout for rollout in group if rollout.reward is not None]
        if scored:
            values = advantages([r.reward for r in scored if r.reward is not None], kind)
            out += [Weighted(r, a) for r, a in zip(scored, values, strict=True)]
    return out


def _add_gradients(model: nn.Module) -> None:
    """Adds the gradients of all ranks; a parameter without one on this rank counts as zeros."""
    if not together.active():
        return
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


class Updater:
    """Makes updates: log-probabilities, loss, gradient, optimiser."""

    def __init__(self, config: RLConfig, session: Session, policy: Policy, pad: int) -> None:
        self.config, self.session, self.policy, self.pad = config, session, policy, pad
        self.reference: CausalLM | None = None
        """The model that k3 is measured against; of the first policy, whatever step the run resumes at."""

    def keep_reference(self) -> None:
        """Copies the policy as it is now."""
        self.reference = deepcopy(self.policy.model).requires_grad_(False)

    @torch.no_grad()
    def score_before(self, groups: Sequence[Sequence[Rollout]], number: int, totals: Totals) -> Old:
        """ln p of every completion before update `number`, the first of a step, and their mismatch."""
        found: Old = {}
        weighted = weigh(groups, self.config.loss.advantage)
        for micro, (batch, _) in enumerate(self._batches(weighted)):
            scores = self._score(batch, number, micro)
            _compare(totals, batch, scores.logprobs, scores.experts)
            logprobs = scores.logprobs.tolist()
            for place, rollout in enumerate(batch.rollouts):
                mine = (batch.owner == place).tolist()
                found[name(rollout)] = [p for p, own in zip(logprobs, mine, strict=True) if own]
        return found

    def update(
        self,
        groups: Sequence[Sequence[Rollout]],
        step: int,
        number: int,
        totals: Totals,
        old: Old | None = None,
    ) -> None:
        """Update `number` (counted over the run) in step `step`, on `groups` of this rank.

        `old` is what `score_before` found at the start of the step; None if that is now.

        Raises NonFiniteError, with the policy as it was before, if loss or gradient is not finite.
        """
        weighted = weigh(groups, self.config.loss.advantage)
        # Completions without an advantage have a gradient only through the reference.
        every = self.config.loss.kl > 0
        batches = self._batches([w for w in weighted if every or w.advantage != 0.0])
        silent = self._batches([w for w in weighted if not every and w.advantage == 0.0])
        denominator, count = together.total([self._weight(weighted), len(batches)], self.session.device)
        totals.updates += 1
        for micro, batch in enumerate(silent, start=len(batches)):
            self._measure(batch, number, micro, totals, compare=old is None)
        if count == 0 or denominator == 0:
            totals.idle += 1
            return
        optimiser = self.session.optimiser
        self.session.model.train()
        loss = self._backward(batches, old, number, denominator, totals)
        _add_gradients(self.session.model)
        norm = optimiser.clip_gradients()
        (value,) = together.total([loss], self.session.device)
        if not (math.isfinite(value) and math.isfinite(float(norm))):
            optimiser.zero_grad()
            place = locate(
                self.session.model,
                lambda: self._backward(batches, old, number, denominator, Totals()),
                step + 1,
            )
            raise NonFiniteError(
                f"step {step + 1}: the loss is {value:.4g} and the gradient norm {float(norm):.4g}: {place}; "
                f"the update was not applied, its rollouts are saved, and {self.session.last_checkpoint()}"
            )
        optimiser.set_factor(lr_factor(step, self.config.schedule))
        optimiser.step()
        optimiser.zero_grad()
        totals.loss += value
        totals.norm = max(totals.norm, float(norm))

    def _batches(self, weighted: Sequence[Weighted]) -> list[tuple[MicroBatch, Tensor]]:
        """Micro-batches on the device, and the advantage [n] of each of their new tokens."""
        by_id = {id(w.rollout): w.advantage for w in weighted}
        device = self.session.device
        packed = micro_batches(
            [w.rollout for w in weighted],
            self.config.micro_tokens,
            self.pad,
            multiple=128 if device.type == "cuda" else 1,
        )
        out = []
        for batch in packed:
            values = torch.tensor([by_id[id(rollout)] for rollout in batch.rollouts])
            out.append((batch.to(device), values[batch.owner].to(device)))
        return out

    def _weight(self, weighted: Sequence[Weighted]) -> int:
        if self.config.loss.normalise == "length":
            return len(weighted) * self.config.sampling.max_new_tokens
        return sum(len(w.rollout.tokens) for w in weighted)

    def _score(self, batch: MicroBatch, number: int, micro: int) -> Any:
        self.policy.begin_training(number, micro)
        return score(
            self.policy.model,
            batch,
            temperature=self.config.sampling.temperature,
            invariant=self.policy.invariant,
            replay=self.config.loss.router_replay,
        )

    @torch.no_grad()
    def _measure(
        self, pair: tuple[MicroBatch, Tensor], number: int, micro: int, totals: Totals, compare: bool
    ) -> None:
        """Entropy, and mismatch if it is not known yet, of completions that have no gradient."""
        batch, _ = pair
        scores = self._score(batch, number, micro)
        if compare:
            _compare(totals, batch, scores.logprobs, scores.experts)
        totals.tokens += len(batch.targets)
        totals.entropy += float(scores.entropy.sum())

    def _backward(
        self,
        batches: Sequence[tuple[MicroBatch, Tensor]],
        old: Old | None,
        number: int,
        denominator: float,
        totals: Totals,
    ) -> float:
        """Adds the gradient of this rank's share of the loss; returns the share."""
        share = 0.0
        config = self.config.loss
        for micro, (batch, advantage) in enumerate(batches):
            reference = self._reference(batch)
            scores = self._score(batch, number, micro)
            before = scores.logprobs.detach() if old is None else _gather(batch, old)
            parts = token_loss(scores.logprobs, before, batch.sampled, advantage, config, reference)
            loss = parts.loss.sum() / denominator
            loss.backward()
            share += float(loss.detach())
            if old is None:
                _compare(totals, batch, before, scores.experts)
            totals.tokens += len(batch.targets)
            totals.entropy += float(scores.entropy.sum())
            totals.clipped += float(parts.clipped.sum())
            totals.masked += float(parts.masked.sum())
            totals.kl += float(parts.kl.sum())
        return share

    @torch.no_grad()
    def _reference(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        return score(
            self.reference,
            batch,
            temperature=self.config.sampling.temperature,
            invariant=self.policy.invariant,
            replay=self.config.loss.router_replay,
        ).logprobs
