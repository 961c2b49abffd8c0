"""Every setting of a run of reinforcement learning; tyro makes the command line from it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from nybble.errors import ConfigError
from nybble.models.generate import COLDEST
from nybble.pretrain.config import (
    LONGEST_S,
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimiserConfig,
    PretrainConfig,
    ScheduleConfig,
)
from nybble.rl.loss import LossConfig
from nybble.rl.mismatch import WatchConfig
from nybble.rl.tasks import TaskConfig


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What is sampled in a step."""

    prompts: int = 16
    """Problems a step."""
    group: int = 8
    """Completions a problem; their mean reward is the baseline of each."""
    max_new_tokens: int = 64
    """Longest completion."""
    temperature: float = 1.0
    """Divides the logits; the trainer scores tokens at the same temperature."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability. Below 1 the recorded
    log-probabilities are still those of the whole distribution.
    """
    rows: int = 128
    """Completions sampled together; rounded down to whole groups."""

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "max_new_tokens", "rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not COLDEST <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be at least {COLDEST}, as greedy groups are all "
                "equal, and finite"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie above 0 and at most at 1")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy reward on held-out problems: a tenth of all prompts, chosen by their hash, never trained on."""

    eval_every: int = 10
    """Steps between evaluations; the first and the last policy are always evaluated; 0 turns all off."""
    eval_problems: int = 64
    """Problems of one evaluation, always the same ones."""

    def __post_init__(self) -> None:
        if self.eval_every < 0 or self.eval_problems < 1:
            raise ConfigError("eval_every must not be negative, and eval_problems at least 1")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Who samples."""

    engine: Literal["own", "vllm"] = "own"
    """own: the model in this process; vllm: a running server that speaks vLLM's protocol."""
    url: str = "http://127.0.0.1:8000"
    """Address of the server."""
    export_to: Path | None = None
    """Folder that the server was started with; the four-bit weights are written there before each step."""
    served_model: str = ""
    """Name that the server knows the model by; empty is the path of export_to."""
    timeout_s: float = 600.0
    """Longest wait for one answer of the server, in seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= LONGEST_S:
            raise ConfigError(
                f"timeout_s is {self.timeout_s} s; it must be above 0 and at most {LONGEST_S:g}"
            )
        if not re.fullmatch(r"https?://([^/\s:@[\]]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/\S*)?", self.url):
            raise ConfigError(f"url is {self.url!r}; it must look like http://127.0.0.1:8000")
        if self.engine == "vllm" and self.export_to is None:
            raise ConfigError(
                "export_to: --engine vllm needs the folder that the server was started with, for the weights"
            )


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Train a model on the rewards of a task."""

    model: tyro.conf.Positional[Path] = Path()
    """A run (such as one of nybble sft), a checkpoint, or a folder with a model."""
    recipe: str = ""
    """Precision of sampler and trainer; empty takes the model's own."""
    sample_recipe: str = ""
    """Another precision for the sampler alone, to see what a mismatch does; empty takes the recipe's."""
    out: Path = Path("runs/rl")
    """Run folder."""
    seed: int = 0
    """Seed of the draws of sampling and rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    batch_invariant: bool = True
    """Fixed order of additions in sampler and trainer: their log-probabilities are equal, bit for bit."""
    rollouts: Path | None = None
    """Train on this file of rollouts instead of sampling."""
    sample_only: bool = False
    """Sample and score, and train nothing."""
    micro_tokens: int = 4096
    """Most tokens in one forward and backward pass of the trainer."""
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(lr=1e-4, weight_decay=0.0, bias_update=0.0)
    )
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(steps=50, warmup=5, decay=0.0))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(save_every=10))
    log: LogConfig = field(default_factory=lambda: LogConfig(log_every=1))

    def __post_init__(self) -> None:
        self.session_config()  # whose checks hold here too
        if self.micro_tokens < 1:
            raise ConfigError(f"micro_tokens is {self.micro_tokens}; it must be at least 1")
        if self.rollouts is not None and self.sample_only:
            raise ConfigError("--rollouts trains without sampling and --sample-only samples without training")
        if self.loss.updates > self.sampling.prompts:
            raise ConfigError(
                f"updates is {self.loss.updates}, but a step has {self.sampling.prompts} prompts to share out"
            )
        if self.sampling.group < 2 and not (self.sample_only or self.rollouts):
            raise ConfigError(
                "group is 1; it must be at least 2: a completion is judged against its group's mean"
            )
        if self.engine.engine == "vllm" and self.loss.router_replay:
            raise ConfigError("router_replay: the server does not say which experts it chose; use engine own")

    def session_config(self) -> PretrainConfig:
        """The settings that the session and its optimiser read."""
        return PretrainConfig(
            preset="",
            recipe=self.recipe,
            out=self.out,
            seed=self.seed,
            device=self.device,
            threads=self.threads,
            batch=BatchConfig(),
            optimiser=self.optimiser,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            log=self.log,
        )
