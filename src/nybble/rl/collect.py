"""Sampling and scoring of a step, a batch of whole groups at a time, each saved before the next begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from nybble.data import TextTokenizer
from nybble.rl import rollout as files
from nybble.rl.engine import Engine
from nybble.rl.problems import Posed
from nybble.rl.rollout import Rollout
from nybble.rl.sampler import Completion, Request, SamplingParams


def step_file(run: Path, step: int, rank: int = 0) -> Path:
    """Where the rollouts of the policy after `step` steps lie."""
    return run / "rollouts" / f"step_{step:08d}{f'.rank{rank}' if rank else ''}.jsonl"


class Collector:
    """Turns problems into rollouts. Batches that an earlier process saved are read, not sampled again."""

    def __init__(
        self, engine: Engine, tokenizer: TextTokenizer, params: SamplingParams, group: int, rows: int
    ) -> None:
        """`group` completions a problem, about `rows` sampled together."""
        self.engine, self.tokenizer, self.params, self.group = engine, tokenizer, params, group
        self.batch = max(1, rows // group)

    def collect(self, posed: Sequence[Posed], step: int, path: Path) -> list[Rollout]:
        """All rollouts of a step, which are in the file `path` afterwards."""
        done = files.read(path, partial=True) if path.is_file() else []
        whole = len(done) // (self.batch * self.group) * self.batch
        whole = len(posed) if len(done) >= len(posed) * self.group else whole
        kept = done[: whole * self.group]
        if len(kept) != len(done) or not path.is_file():
            files.write(path, kept)
        for start in range(whole, len(posed), self.batch):
            part = posed[start : start + self.batch]
            fresh = self.sample(part, step, self.group, self.params)
            files.write(path, fresh, append=True)
            kept += fresh
        return kept

    def sample(self, posed: Sequence[Posed], step: int, group: int, params: SamplingParams) -> list[Rollout]:
        """`group` scored completions of each problem, problem by problem."""
        requests = [Request(prompt=p.tokens, problem=p.index, sample=i) for p in posed for i in range(group)]
        completions = self.engine.sample(requests, params, step)
        return [
            self._rollout(posed[place // group], request, completion, step)
            for place, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]

    def _rollout(self, posed: Posed, request: Request, completion: Completion, step: int) -> Rollout:
        text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        reward, error = score(posed, text)
        return Rollout(
            step=step,
            problem=posed.index,
            sample=request.sample,
            prompt=posed.problem.prompt,
            prompt_tokens=posed.tokens,
            text=text,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            finish=completion.finish,
            reward=reward,
            error=error,
            experts=completion.experts,
            tokenizer=self.tokenizer.sha256[:12],
        )


def score(posed: Posed, text: str) -> tuple[float | None, str]:
    """Reward of a text, or None and the reason if the task raises or gives no finite number."""
    try:
        reward = float(posed.problem.reward(text))
    except Exception as error:  # the task is the user's code, and its completion is worth keeping
        return None, f"reward raised {type(error).__name__}: {error}"
    if not math.isfinite(reward):
        return None, f"reward is {reward}"
    return reward, ""
