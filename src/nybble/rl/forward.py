"""The trainer's forward pass over rollouts: log-probabilities of their new tokens, and the experts chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from nybble.models import CausalLM
from nybble.models.invariant import batch_invariant
from nybble.models.logprobs import token_log_probs
from nybble.rl.batching import MicroBatch
from nybble.rl.routing import note_routing, replay_routing


@dataclass(frozen=True)
class Scores:
    """Of the n new tokens of a micro-batch, in its order."""

    logprobs: Tensor
    """[n] FP32 ln p at the sampling temperature."""
    entropy: Tensor
    """[n] FP32, nats, without gradient."""
    experts: Tensor | None
    """[B * S, L, k] int64, what each token of the micro-batch was routed to."""


@contextmanager
def chunked_attention(model: CausalLM, enabled: bool) -> Iterator[None]:
    """Attention by the op that the batch-invariant mode knows, on GPUs too."""
    before = model.flex
    model.flex = False if enabled else before
    try:
        yield
    finally:
        model.flex = before


def score(
    model: CausalLM,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    invariant: bool = False,
    replay: bool = False,
) -> Scores:
    """Scores the new tokens of `batch`, differentiably.

    Args:
        model: converted; its forward precision is the trainer's.
        batch: on the model's device.
        temperature: of the sampling; 0 counts as 1.
        invariant: compute in the batch-invariant mode.
        replay: send tokens to the experts that the sampler chose.
    """
    with (
        chunked_attention(model, invariant),
        batch_invariant(invariant),
        replay_routing(model, batch.experts if replay else None),
        note_routing(model) as note,
    ):
        hidden = model(batch.ids, segments=batch.segments, return_hidden=True, return_logits=False).hidden
        rows = hidden.flatten(0, 1).index_select(0, batch.places)
        logprobs, entropy = token_log_probs(
            rows,
            model.lm_head.weight,
            batch.targets,
            model.cap,
            temperature or 1.0,
        )
        return Scores(logprobs, entropy, note.stacked() if note is not None else None)
