"""Batched sampling from the policy in its own forward precision, with what a trainer needs to know of it.

Each completion comes with the log-probability of every sampled token and the experts of every token that went
through the model. Draws are named by (seed, policy version, problem, sample, position) and not by place in a
batch; finished sequences leave the batch, so that the others need not wait for the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from nybble.errors import ConfigError
from nybble.formats.philox import philox4x32
from nybble.models import CausalLM
from nybble.models.generate import Decoder, check_sampling, pick
from nybble.models.invariant import batch_invariant
from nybble.rl.forward import chunked_attention
from nybble.rl.routing import Experts, RoutingNote, note_routing

DRAW_TAG = 240
"""In the counter's place of an operand, where rounding has numbers below 16."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample."""

    prompt: tuple[int, ...]
    """Token ids."""
    problem: int
    """Index of the problem, below 2^24; with `sample` it names the draws."""
    sample: int
    """Index within the problem's group."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was sampled for a request."""

    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """ln p of each at the sampling temperature, before top-p cuts the distribution; FP32 values."""
    finish: str
    """"stop" or "length"."""
    experts: Experts | None = field(default=None, compare=False)
    """[prompt + new - 1, L, k]; None if the model routes not, or the engine does not say."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")


def token_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """ln p of all tokens [.., V], FP32; at temperature 0 those of temperature 1."""
    return torch.log_softmax(logits if temperature in (0.0, 1.0) else logits / temperature, dim=-1)


def uniforms(
    params: SamplingParams, version: int, problems: Tensor, samples: Tensor, position: int
) -> Tensor:
    """One draw in [0, 1) a row, FP32, from the names of the rows alone."""
    counter = (
        torch.full_like(problems, position),
        samples,
        torch.full_like(problems, version),
        ((problems << 8) | DRAW_TAG) & 0xFFFFFFFF,
    )
    seed = torch.full_like(problems, params.seed)
    word = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[0]
    return (word >> 8).float() * 2.0**-24


@torch.no_grad()
def sample(
    model: CausalLM,
    requests: Sequence[Request],
    params: SamplingParams,
    stop: frozenset[int],
    *,
    version: int = 0,
    invariant: bool = False,
    prefill_chunk: int = 1024,
) -> list[Completion]:
    """Completes all requests as one batch.

    Args:
        model: converted; its forward precision is the sampler's.
        requests: of any lengths.
        params: see `SamplingParams`.
        stop: tokens that end a completion.
        version: of the policy: the draws of two versions differ.
        invariant: sample in the batch-invariant mode.
        prefill_chunk: prompt tokens of one sequence that go through the model at once.
    """
    if not requests:
        return []
    training = model.training
    model.eval()
    try:
        with (
            chunked_attention(model, invariant),
            batch_invariant(invariant),
            note_routing(model) as note,
        ):
            return _sample(model, requests, params, stop, version, prefill_chunk, note)
    finally:
        model.train(training)


class _Rows:
    """Everything gathered for the requests of one batch."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.experts: list[list[Experts]] = [[] for _ in range(count)]
        self.stopped = [False] * count

    def note(self, note: RoutingNote | None, rows: list[int], skip: list[int] | None = None) -> None:
        """Adds the experts of the last forward pass, without the first `skip` tokens of each row."""
        if note is None:
            return
        passed = note.stacked()
        each = passed.view(len(rows), -1, *passed.shape[1:]).cpu().numpy().astype(np.uint16)
        for place, row in enumerate(rows):
            self.experts[row].append(each[place, skip[place] if skip else 0 :])


def _sample(
    model: nn.Module,
    requests: Sequence[Request],
    params: SamplingParams,
    stop: frozenset[int],
    version: int,
    prefill_chunk: int,
    note: RoutingNote | None,
) -> list[Completion]:
    out = _Rows(len(requests))
    decoder = Decoder(model, [request.prompt for request in requests], prefill_chunk)
    device = decoder.rows.device
    problems = torch.tensor([request.problem for request in requests], device=device)
    samples = torch.tensor([request.sample for request in requests], device=device)
    rows = list(range(len(requests)))
    left = list(decoder.padding)

    def each_chunk(count: int) -> None:
        out.note(note, rows, [min(pad, count) for pad in left])
        left[:] = [max(0, pad - count) for pad in left]

    logits = decoder.prefill(each_chunk)
    for position in range(params.max_new_tokens):
        draw = uniforms(params, version, problems[decoder.rows], samples[decoder.rows], position)
        token = pick(logits, params.temperature, params.top_p, draw)
        logprob = token_logprobs(logits, params.temperature).gather(1, token[:, None])[:, 0]
        alive = []
        for place, (row, t, p) in enumerate(zip(rows, token.tolist(), logprob.tolist(), strict=True)):
            out.tokens[row].append(t)
            out.logprobs[row].append(p)
            out.stopped[row] = t in stop
            if not out.stopped[row]:
                alive.append(place)
        if not alive or position + 1 == params.max_new_tokens:
            break
        if len(alive) < len(rows):
            places = torch.tensor(alive, device=device)
            decoder.keep(places)
            token, rows = token[places], [rows[place] for place in alive]
        logits = decoder.step(token)
        out.note(note, rows)
    return [
        Completion(
            tokens=tuple(out.tokens[i]),
            logprobs=tuple(out.logprobs[i]),
            finish="stop" if out.stopped[i] else "length",
            experts=np.concatenate(out.experts[i]) if out.experts[i] else None,
        )
        for i in range(len(requests))
    ]
