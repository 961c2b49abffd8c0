"""Batched sampling from a model with a `new_cache`, for prompts of different lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import NybbleError

PREFILL_TOKENS = 1024
"""Prompt tokens of one sequence that go through the model at once."""


def pick(logits: Tensor, temperature: float, top_p: float, draw: Tensor) -> Tensor:
    """One token a row.

    Args:
        logits: [B, vocabulary].
        temperature: divides the logits; 0 takes the largest.
        top_p: sample from the smallest set of most likely tokens that holds this much probability (arXiv
            1904.09751).
        draw: [B] uniform in [0, 1).

    Returns:
        [B] int64.
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    probabilities, tokens = torch.softmax(logits.float() / temperature, dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    below = probabilities.cumsum(-1)
    kept = torch.where(below - probabilities < top_p, probabilities, 0.0)
    total = kept.cumsum(-1)
    place = torch.searchsorted(total, (draw.to(total) * total[:, -1])[:, None], right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return tokens.gather(1, place.minimum(last.clamp(min=0)))[:, 0]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | None = None,
) -> list[list[int]]:
    """Continue each prompt.

    A prompt's draws depend on `seed` and its place in `prompts` alone. Shorter prompts are padded on the
    left as a document of their own, which the prompt never sees.

    Args:
        model: `Inkling2ForCausalLM` or alike.
        prompts: token ids, at least one a prompt.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 is greedy.
        top_p: see `pick`.
        seed: of the draws.
        eos: stop a sequence at this token, which stays in the result.

    Returns:
        The new tokens of each prompt.

    Raises:
        NybbleError: an empty prompt, a temperature below 0, a top_p outside (0, 1], or ids the model does
            not know.
    """
    if temperature < 0.0:
        raise NybbleError(f"temperature = {temperature} must not be negative; 0 is greedy")
    if not 0.0 < top_p <= 1.0:
        raise NybbleError(f"top_p = {top_p} must lie in (0, 1]")
    if any(len(prompt) == 0 for prompt in prompts):
        raise NybbleError("a prompt is empty; give at least one token, for example the end-of-text token")
    if not prompts or max_new_tokens <= 0:
        return [[] for _ in prompts]
    device = next(model.parameters()).device
    B, longest = len(prompts), max(len(prompt) for prompt in prompts)
    ids = torch.zeros(B, longest, dtype=torch.int64)
    real = torch.zeros(B, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        real[row, longest - len(prompt) :] = 1
    ragged = bool((real == 0).any())
    positions = (real.cumsum(1) - 1).clamp(min=0)
    draws = torch.stack(
        [
            torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed * 1_000_003 + row))
            for row in range(B)
        ]
    ).to(device)
    ids, real, positions = ids.to(device), real.to(device), positions.to(device)
    mode = model.training
    model.eval()
    try:
        return _run(model, ids, real if ragged else None, positions, draws, temperature, top_p, eos)
    finally:
        model.train(mode)


def _run(
    model: Any,
    ids: Tensor,
    real: Tensor | None,
    positions: Tensor,
    draws: Tensor,
    temperature: float,
    top_p: float,
    eos: int | None,
) -> list[list[int]]:
    cache = model.new_cache()
    B, S = ids.shape
    for start in range(0, S, PREFILL_TOKENS):
        part = slice(start, min(start + PREFILL_TOKENS, S))
        logits = model(
            ids[:, part],
            segments=None if real is None else real[:, part],
            positions=None if real is None else positions[:, part],
            cache=cache,
            last_only=True,
        ).logits
    position, one = positions[:, -1:], torch.ones_like(ids[:, :1])
    new: list[Tensor] = []
    done = torch.zeros(B, dtype=torch.bool, device=ids.device)
    for step in range(draws.shape[1]):
        token = pick(logits[:, -1], temperature, top_p, draws[:, step])
        new.append(token)
        if eos is not None:
            done |= token == eos
        if step + 1 == draws.shape[1] or bool(done.all()):
            break
        position = position + 1
        logits = model(
            token[:, None],
            segments=None if real is None else one,
            positions=None if real is None else position,
            cache=cache,
            last_only=True,
        ).logits
    rows = torch.stack(new, dim=1).tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]
