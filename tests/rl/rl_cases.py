"""A small converted model, requests of many lengths, and what is sampled for them."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inkling2_cases import random_model, small_config

from nybble import convert
from nybble.checkpoints.hub import save_model
from nybble.data.tokenizer import SMALLEST_VOCAB, train_tokenizer
from nybble.layers import set_step
from nybble.models import Inkling2ForCausalLM
from nybble.pretrain import metrics
from nybble.pretrain.config import CheckpointConfig, OptimiserConfig, ScheduleConfig
from nybble.pretrain.metrics import TIMING_FIELDS
from nybble.recipes import load_recipe
from nybble.rl.config import EvaluationConfig, RLConfig, SamplingConfig
from nybble.rl.rollout import Rollout
from nybble.rl.sampler import Completion, Request, SamplingParams
from nybble.rl.tasks import TaskConfig

LENGTHS = (3, 1, 9, 17, 5, 30, 2, 12)
PARAMS = SamplingParams(max_new_tokens=24, seed=3)
STOP = frozenset({1, 7, 20})


def policy_model(recipe: Any, device: str = "cpu") -> Inkling2ForCausalLM:
    """Three layers whose weights are all random and large: logits far apart, log scaling in force."""
    model = random_model(hidden_size=64, head_dim=16, swa_head_dim=16, log_scaling_n_floor=8)
    model.to(device)
    convert(model, recipe)
    set_step(model, 0)
    return model


def requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    prompts = [tuple(torch.randint(0, 100, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(prompt=prompt, problem=i // 4, sample=i % 4) for i, prompt in enumerate(prompts)]


def rollout(request: Request, completion: Completion, reward: float | None = 0.0) -> Rollout:
    return Rollout(
        step=0, problem=request.problem, sample=request.sample, prompt="", prompt_tokens=request.prompt,
        text="", tokens=completion.tokens, logprobs=completion.logprobs, finish=completion.finish,
        reward=reward, experts=completion.experts,
    )  # fmt: skip


class Letters:
    """A task that random models get something for: the share of their bytes that are letters or digits."""

    def __init__(self, seed: int = 0, level: int = 1) -> None:
        self.seed, self.level = seed, level

    def problem(self, index: int) -> "LettersProblem":
        return LettersProblem(f"{index * 7 % 50}?" + "x" * (index % 4))


@dataclass(frozen=True)
class LettersProblem:
    prompt: str
    solution: str = "abc"

    def reward(self, text: str) -> float:
        return sum(c.isalnum() for c in text) / max(1, len(text))


class Troubled(Letters):
    """Every kind of failure that a task of a user's may have, in turn."""

    def problem(self, index: int) -> LettersProblem:
        if index % 7 == 3:
            raise KeyError("no such problem")
        if index % 7 == 4:
            return LettersProblem("")
        if index % 7 == 5:
            return LettersProblem("long" * 500)
        return TroubledProblem(f"{index}?")


class TroubledProblem(LettersProblem):
    def reward(self, text: str) -> float:
        kind = zlib.crc32(text.encode()) % 3
        if kind == 0:
            raise ZeroDivisionError("cannot judge")
        return float("nan") if kind == 1 else super().reward(text)


def tiny_folder(folder: Path, recipe: str = "inkling") -> Path:
    """A model of bytes with random weights, as `nybble sft` saves one."""
    tokenizer = train_tokenizer([], SMALLEST_VOCAB)
    size = tokenizer.vocab_size
    config = small_config(
        vocab_size=size, unpadded_vocab_size=size, hidden_size=64, head_dim=16, swa_head_dim=16,
        pad_token_id=tokenizer.pad_id, bos_token_id=None, eos_token_id=tokenizer.eot_id,
    )  # fmt: skip
    torch.manual_seed(5)
    save_model(folder, Inkling2ForCausalLM(config), tokenizer, load_recipe(recipe))
    return folder


def rl_config(model: Path, out: Path, **changes: Any) -> RLConfig:
    """Two problems of four completions a step, of at most five tokens."""
    values: dict[str, Any] = {
        "task": TaskConfig(task="rl_cases:Letters"),
        "sampling": SamplingConfig(prompts=2, group=4, max_new_tokens=5, rows=4),
        "evaluation": EvaluationConfig(eval_every=2, eval_problems=3),
        "schedule": ScheduleConfig(steps=3, warmup=0, decay=0.0),
        "checkpoint": CheckpointConfig(save_every=1, keep=5),
        "optimiser": OptimiserConfig(lr=1e-2, weight_decay=0.0, bias_update=0.0),
        "device": "cpu",
    }
    return RLConfig(model=model, out=out, **(values | changes))


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if key not in TIMING_FIELDS}
        for row in metrics.read(run / "metrics.jsonl")
    ]
