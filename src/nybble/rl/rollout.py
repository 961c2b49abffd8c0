"""A rollout: one completion of one problem with its reward, and the JSONL file of many.

Floats are written so that reading them back gives the same FP32 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nybble.errors import DataError
from nybble.rl.routing import Experts, pack, unpack


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion. Token ids belong to the tokenizer whose hash the file's lines carry."""

    step: int
    """Optimiser steps that the policy had behind it."""
    problem: int
    """Index of the problem; completions with the same step and problem are a group."""
    sample: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """The sampler's ln p of each new token."""
    finish: str
    """"stop" or "length"."""
    reward: float | None
    """None if the reward could not be had; `error` says why."""
    error: str = ""
    experts: Experts | None = field(default=None, compare=False)
    """[prompt + new - 1, L, k]."""
    tokenizer: str = ""
    """SHA-256 of tokenizer.json, 12 hex digits."""

    def line(self) -> str:
        """The rollout as one line of JSON."""
        values = {name: getattr(self, name) for name in _PLAIN}
        return json.dumps(values | {"experts": pack(self.experts)}, allow_nan=False)


_PLAIN = tuple(name for name in Rollout.__dataclass_fields__ if name != "experts")
_TUPLES = ("prompt_tokens", "tokens", "logprobs")


def parse(line: str, where: str) -> Rollout:
    """The rollout of a line. Raises DataError naming `where` if a field is missing or malformed."""
    try:
        values: dict[str, Any] = json.loads(line)
        values |= {name: tuple(values[name]) for name in _TUPLES}
        values["experts"] = unpack(values.get("experts"))
        rollout = Rollout(**{name: values[name] for name in (*_PLAIN, "experts") if name in values})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is no rollout: {type(error).__name__} {error}") from None
    if len(rollout.tokens) != len(rollout.logprobs):
        raise DataError(
            f"{where}: {len(rollout.tokens)} tokens but {len(rollout.logprobs)} log-probabilities"
        )
    if not rollout.prompt_tokens or not rollout.tokens:
        raise DataError(f"{where}: a rollout needs at least one prompt token and one new token")
    if not all(math.isfinite(p) for p in rollout.logprobs):
        raise DataError(f"{where}: a log-probability is not finite")
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        raise DataError(f"{where}: the reward {rollout.reward} is not finite")
    return rollout


def write(path: Path, rollouts: Iterable[Rollout], *, append: bool = False) -> None:
    """Writes rollouts, one a line; a line is there as a whole or not at all for `read(..., partial=True)`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.write("".join(rollout.line() + "\n" for rollout in rollouts))


def read(path: Path, *, partial: bool = False) -> list[Rollout]:
    """All rollouts of a file; `partial` passes over a last line that a kill cut short.

    Raises DataError naming the file and the line that is malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{path}: no such file of rollouts") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no file of rollouts: {error}") from None
    lines = text.split("\n")
    whole = lines[:-1] if partial else [line for line in lines if line]
    return [parse(line, f"{path}:{number}") for number, line in enumerate(whole, start=1)]


def groups(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    """Rollouts of one step and problem together, in the order of their first one."""
    found: dict[tuple[int, int], list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault((rollout.step, rollout.problem), []).append(rollout)
    return iter(found.values())
