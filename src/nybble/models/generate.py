"""Batched sampling from a model with a `new_cache`, for prompts of different lengths."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import NybbleError

PREFILL_TOKENS = 1024
"""Prompt tokens of one sequence that go through the model at once."""

COLDEST = 1e-3
"""Least temperature above 0: FP32 holds logits divided by it, and colder ones hardly differ from greedy."""


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
    if top_p == 1.0:
        # all tokens are kept, so their order does not matter and nothing need be sorted
        below = torch.softmax(logits.float() / temperature, dim=-1).cumsum(-1)
        place = torch.searchsorted(below, (draw.to(below) * below[:, -1])[:, None], right=True)
        return place[:, 0].clamp(max=logits.shape[-1] - 1)
    probabilities, tokens = torch.softmax(logits.float() / temperature, dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    below = probabilities.cumsum(-1)
    kept = torch.where(below - probabilities < top_p, probabilities, 0.0)
    total = kept.cumsum(-1)
    place = torch.searchsorted(total, (draw.to(total) * total[:, -1])[:, None], right=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return tokens.gather(1, place.minimum(last.clamp(min=0)))[:, 0]


class Decoder:
    """Sequences under generation: `prefill` reads their prompts, each `step` adds one token to each.

    Shorter prompts are padded on the left as a document of their own, which the prompt never sees. `rows`
    [live] says which prompts are still here; `keep` drops the others.
    """

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], chunk: int = PREFILL_TOKENS
    ) -> None:
        """`prompts` are token ids, at least one a prompt; `chunk` of a sequence go through the model at once.

        Raises NybbleError for an empty prompt.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise NybbleError("a prompt is empty; give at least one token, for example the end-of-text token")
        self._model: Any = model
        self._chunk = chunk
        device = next(model.parameters()).device
        B, longest = len(prompts), max(len(prompt) for prompt in prompts)
        ids = torch.zeros(B, longest, dtype=torch.int64)
        real = torch.zeros(B, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            real[row, longest - len(prompt) :] = 1
        self.padding = [longest - len(prompt) for prompt in prompts]
        """Tokens before each prompt."""
        self._ragged = bool((real == 0).any())
        positions = (real.cumsum(1) - 1).clamp(min=0)
        self._ids, self._real, self._positions = ids.to(device), real.to(device), positions.to(device)
        new_cache: Any = model.new_cache
        self._cache = new_cache()
        self.rows = torch.arange(B, device=device)

    def prefill(self, after_chunk: Callable[[int], None] | None = None) -> Tensor:
        """Logits [B, vocabulary] of the first new token; calls `after_chunk(tokens a row)` chunk by chunk."""
        S = self._ids.shape[1]
        for start in range(0, S, self._chunk):
            part = slice(start, min(start + self._chunk, S))
            logits = self._forward(self._ids[:, part], self._real[:, part], self._positions[:, part])
            if after_chunk is not None:
                after_chunk(part.stop - start)
        self._position, self._one = self._positions[:, -1:], torch.ones_like(self._ids[:, :1])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [live, vocabulary] of what follows `tokens` [live]."""
        self._position = self._position + 1
        return self._forward(tokens[:, None], self._one, self._position)

    def keep(self, places: Tensor) -> None:
        """Go on with these of the live sequences alone: int64 [n], indices into `rows`."""
        self.rows = self.rows[places]
        self._position, self._one = self._position[places], self._one[places]
        self._cache.select(places)

    def _forward(self, ids: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            ids,
            segments=real if self._ragged else None,
            positions=positions if self._ragged else None,
            cache=self._cache,
            last_only=True,
        ).logits
        return logits[:, -1]


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise NybbleError for a temperature below COLDEST that is not 0, or a top_p outside (0, 1]."""
    if not (temperature >= COLDEST or temperature == 0.0):  # nor NaN
        raise NybbleError(f"temperature = {temperature} must be {COLDEST} or more, or 0, which is greedy")
    if not 0.0 < top_p <= 1.0:
        raise NybbleError(f"top_p = {top_p} must lie in (0, 1]")


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

    A prompt's draws depend on `seed` and its place in `prompts` alone.

    Args:
        model: a `CausalLM`.
        prompts: token ids, at least one a prompt.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 is greedy.
        top_p: see `pick`.
        seed: of the draws.
        eos: stop a sequence at this token, which stays in the result.

    Returns:
        The new tokens of each prompt.

    Raises:
        NybbleError: an empty prompt, a temperature or top_p that `check_sampling` refuses, or ids the model
            does not know.
    """
    check_sampling(temperature, top_p)
    if not prompts or max_new_tokens <= 0:
        return [[] for _ in prompts]
    mode = model.training
    model.eval()
    try:
        decoder = Decoder(model, prompts)
        draws = torch.stack(
            [
                torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed * 1_000_003 + row))
                for row in range(len(prompts))
            ]
        ).to(decoder.rows.device)
        logits = decoder.prefill()
        new: list[Tensor] = []
        done = torch.zeros_like(decoder.rows, dtype=torch.bool)
        for step in range(max_new_tokens):
            token = pick(logits, temperature, top_p, draws[:, step])
            new.append(token)
            if eos is not None:
                done |= token == eos
            if step + 1 == max_new_tokens or bool(done.all()):
                break
            logits = decoder.step(token)
    finally:
        model.train(mode)
    rows = torch.stack(new, dim=1).tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]
