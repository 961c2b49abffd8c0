"""`nybble sample`: text from a trained model, with the precision of its recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from nybble.commands.flags import parse_flags
from nybble.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Continue a prompt with a trained model, whose forward pass is that of its training."""

    model: tyro.conf.Positional[Path]
    """A run, a checkpoint, or a folder with a model."""
    prompt: str = "\n"
    """Text to continue."""
    max_new_tokens: int = 100
    """Tokens to add at most."""
    temperature: float = 0.8
    """Divides the logits: 0 always takes the likeliest token, 1 samples as the model predicts."""
    top_p: float = 0.95
    """Sample from the likeliest tokens that together have this probability, above 0 and at most 1."""
    seed: int = 0
    """Seed of the draws: the same seed gives the same text."""
    recipe: str = ""
    """Precision in place of the model's own, such as bf16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 or more, and finite")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}; it must lie in [0, 2^63)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie above 0 and at most at 1")


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(SampleConfig, arguments, "sample")
    import sys

    from nybble.checkpoints.hub import load_model
    from nybble.models.generate import check_sampling, generate
    from nybble.pretrain.device import numerics_status, pick_device

    check_sampling(config.temperature, config.top_p)
    device = pick_device(config.device)
    trained = load_model(config.model, config.recipe, device)
    # On stderr, so that stdout is the text and nothing else.
    print(f"recipe {trained.recipe.name}; {numerics_status(device)}", file=sys.stderr)
    tokenizer = trained.tokenizer
    # bytes of the command line that are no text in its locale are taken as UTF-8
    text = config.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    prompt = tokenizer.encode(text) or [tokenizer.eot_id]
    longest = trained.model.config.max_position_embeddings
    room = longest + 1 - len(prompt)  # the last token need not be read
    if room < 1:
        raise ConfigError(f"prompt has {len(prompt)} tokens, and the model reads {longest}; shorten it")
    if config.max_new_tokens > room:
        print(f"at most {room} tokens fit behind the prompt: the model reads {longest}", file=sys.stderr)
    new = generate(
        trained.model,
        [prompt],
        min(config.max_new_tokens, room),
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        eos=tokenizer.eot_id,
    )[0]
    print(text + tokenizer.decode(new, skip_special_tokens=True))
    return 0
