"""Rollouts as micro-batches: several packed into a row, as documents that do not see each other.

Legend: B rows, S tokens a row, n new tokens of all rollouts of a micro-batch, in order; L layers, k experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.rl.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rollouts side by side, and where their new tokens are.

    The end of a row that no rollout fills is padding: a document of its own, without a target.
    """

    rollouts: tuple[Rollout, ...]
    ids: Tensor
    """[B, S] int64."""
    segments: Tensor
    """[B, S] int64, which rollout of its row a token belongs to."""
    places: Tensor
    """[n] int64: the position, row * S + column, whose output predicts each new token."""
    targets: Tensor
    """[n] int64, the new tokens."""
    sampled: Tensor
    """[n] FP32, the sampler's log-probabilities."""
    owner: Tensor
    """[n] int64, index into `rollouts`."""
    experts: Tensor | None
    """[B * S, L, k] int64 of the sampler, -1 where it says nothing; None if it says nothing at all."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on `device`."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def micro_batches(rollouts: Sequence[Rollout], tokens: int, pad: int, multiple: int = 1) -> list[MicroBatch]:
    """Packs rollouts into micro-batches of at most `tokens` positions (or one rollout, if it is longer).

    Rows are as long as the longest rollout, rounded up to `multiple`; long rollouts come first, so that equal
    lengths meet. `pad` fills what is left of a row.
    """
    order = sorted(range(len(rollouts)), key=lambda i: (-_length(rollouts[i]), i))
    out: list[MicroBatch] = []
    while order:
        width = -(-_length(rollouts[order[0]]) // multiple) * multiple
        rows: list[list[int]] = []
        room: list[int] = []
        rest: list[int] = []
        for i in order:
            length = _length(rollouts[i])
            row = next((r for r, left in enumerate(room) if left >= length), None)
            if row is None and (not rows or (len(rows) + 1) * width <= tokens):
                row = len(rows)
                rows.append([])
                room.append(width)
            if row is None:
                rest.append(i)
            else:
                rows[row].append(i)
                room[row] -= length
        out.append(_assemble([[rollouts[i] for i in row] for row in rows], width, pad))
        order = rest
    return out


def _length(rollout: Rollout) -> int:
    """Tokens that go through the model: all but the last."""
    return len(rollout.prompt_tokens) + len(rollout.tokens) - 1


def _assemble(rows: list[list[Rollout]], width: int, pad: int) -> MicroBatch:
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    segments = np.full((len(rows), width), -1, dtype=np.int64)
    places: list[int] = []
    targets: list[int] = []
    sampled: list[float] = []
    owner: list[int] = []
    flat = [rollout for row in rows for rollout in row]
    first = next((rollout.experts for rollout in flat if rollout.experts is not None), None)
    experts = None if first is None else np.full((len(rows) * width, *first.shape[1:]), -1, dtype=np.int64)
    count = 0
    for r, row in enumerate(rows):
        start = 0
        for s, rollout in enumerate(row):
            tokens = (*rollout.prompt_tokens, *rollout.tokens)[:-1]
            end = start + len(tokens)
            ids[r, start:end], segments[r, start:end] = tokens, s
            if experts is not None and rollout.experts is not None:
                experts[r * width + start : r * width + end] = rollout.experts
            before = r * width + start + len(rollout.prompt_tokens) - 1
            places += range(before, before + len(rollout.tokens))
            targets += rollout.tokens
            sampled += rollout.logprobs
            owner += [count] * len(rollout.tokens)
            start, count = end, count + 1
    return MicroBatch(
        rollouts=tuple(flat),
        ids=torch.from_numpy(ids),
        segments=torch.from_numpy(segments),
        places=torch.tensor(places),
        targets=torch.tensor(targets),
        sampled=torch.tensor(sampled, dtype=torch.float32),
        owner=torch.tensor(owner),
        experts=None if experts is None else torch.from_numpy(experts),
    )
