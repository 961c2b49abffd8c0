"""Every setting of a pretraining run: one frozen dataclass, from which tyro makes the command line.

A run's settings come from four places, later ones winning: the defaults below, the preset's own defaults
(`nybble.pretrain.defaults`), a TOML file (`--config`, or the run's own `config.toml` when it resumes), and
the flags of the command line. The sections of the TOML file are the fields of `PretrainConfig`; flags carry
no section name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nybble.errors import ConfigError

MOST_THREADS = 1024
"""More than any machine has cores; OpenMP ends the process where it cannot start as many as it is told to."""

LONGEST_S = 1e9
"""The longest wait that can be set, thirty years: clocks of torch and of sockets do not take any number."""


def _require(condition: bool, field_name: str, sentence: str) -> None:
    if not condition:
        raise ConfigError(f"{field_name} {sentence}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many tokens one optimiser step sees: batch x accumulate x sequence."""

    batch: int = 8
    """Sequences in one forward pass."""
    accumulate: int = 1
    """Forward and backward passes summed into one optimiser step."""
    sequence: int = 512
    """Tokens in one packed sequence."""
    mask_documents: bool = False
    """Keep the documents packed into one sequence from attending to each other."""

    def __post_init__(self) -> None:
        _require(self.batch >= 1, "batch", f"is {self.batch}; it must be at least 1 sequence")
        _require(self.accumulate >= 1, "accumulate", f"is {self.accumulate}; it must be at least 1 pass")
        _require(self.sequence >= 2, "sequence", f"is {self.sequence}; it must be at least 2 tokens")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate * self.sequence


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """The optimiser and its rates. Master weights and moments are FP32 whatever the recipe."""

    optimiser: Literal["adamw", "muon"] = "adamw"
    """adamw for all parameters, or muon for the 2-D matrices of the layers and adamw for the rest."""
    lr: float = 3e-3
    """Peak learning rate. Muon's update is scaled to the RMS of AdamW's, so that one rate serves both."""
    beta1: float = 0.9
    """Decay of AdamW's first moment, a step."""
    beta2: float = 0.95
    """Decay of AdamW's second moment, a step."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, applied to matrices alone: not to norms, biases and short convolutions."""
    momentum: float = 0.95
    """Momentum of Muon."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 leaves it unclipped."""
    bias_update: float = 1e-3
    """How far the router's balancing bias moves towards under-used experts each step; 0 leaves it alone."""

    def __post_init__(self) -> None:
        _require(0 < self.lr < math.inf, "lr", f"is {self.lr}; it must be above 0, and finite")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, f"is {value}; it must lie in [0, 1)")
        for name in ("eps", "weight_decay", "clip", "bias_update"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, f"is {value}; it must be 0 or more, and finite")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, stable, decay: the rate climbs linearly, stays at its peak, and falls linearly at the end."""

    steps: int = 400
    """Optimiser steps of the whole run."""
    warmup: int = 20
    """Steps of linear warm-up."""
    decay: float = 0.4
    """Last fraction of the steps in which the rate falls."""
    final_lr: float = 0.02
    """Rate of the last step, as a fraction of the peak."""

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", f"is {self.steps}; it must be at least 1")
        _require(self.warmup >= 0, "warmup", f"is {self.warmup} steps; it must not be negative")
        _require(0 <= self.decay <= 1, "decay", f"is {self.decay}; it is a fraction of the steps, 0 to 1")
        _require(
            0 <= self.final_lr <= 1, "final_lr", f"is {self.final_lr}; it is a fraction of the peak, 0 to 1"
        )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on the held-out split, computed with the forward pass of the recipe."""

    val_every: int = 50
    """Optimiser steps between validations; the last step is always validated; 0 turns the others off."""
    val_batches: int = 8
    """Batches in one validation, always the same ones."""

    def __post_init__(self) -> None:
        _require(self.val_every >= 0, "val_every", f"is {self.val_every} steps; it must not be negative")
        _require(self.val_batches >= 1, "val_batches", f"is {self.val_batches}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and how much of the past is kept."""

    save_every: int = 100
    """Optimiser steps between checkpoints; the last step is always saved; 0 turns the others off."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted once a newer one is whole. 0 saves none at all: a run that is
    stopped begins again, and its model is gone at its end.
    """

    def __post_init__(self) -> None:
        _require(self.save_every >= 0, "save_every", f"is {self.save_every} steps; it must not be negative")
        _require(self.keep >= 0, "keep", f"is {self.keep}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How several ranks share a run; a run of one process ignores it. May change when a run resumes."""

    expert_parallel: int = 0
    """Ranks that share out the experts of a layer; 0 is as many as divide both ranks and experts."""
    replicate: int = 1
    """Groups of ranks that hold a copy of the whole model each (HSDP); 1 shards it over all. As many as there
    are ranks: nothing is sharded, gradients are summed once a step, and --graph and --compile work.
    """
    reshard: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward pass."""
    traffic: Literal["recipe", "bf16", "mxfp8", "nvfp4"] = "recipe"
    """Format in which all four legs between ranks that share experts travel, in place of the recipe's."""
    gather: Literal["fp32", "bf16", "nvfp4"] = "fp32"
    """How parameters are gathered. bf16 halves that traffic, but rounds before quantising; nvfp4 takes the
    codes of experts whose recipe needs no more, quantised once by their owner, and the rest in FP32.
    """
    slow_exchange: float = 30.0
    """Seconds of waiting for other ranks after which the step, the layer and the leg are reported."""
    exchange_limit: float = 600.0
    """Seconds of waiting for other ranks that end the run."""

    @property
    def legs(self) -> str | None:
        """The format of all legs; None where the recipe says it."""
        return None if self.traffic == "recipe" else self.traffic

    def __post_init__(self) -> None:
        _require(
            self.expert_parallel >= 0,
            "expert_parallel",
            f"is {self.expert_parallel}; it must not be negative",
        )
        _require(self.replicate >= 1, "replicate", f"is {self.replicate}; it must be at least 1 group")
        for name in ("slow_exchange", "exchange_limit"):
            value = getattr(self, name)
            fits = 0 < value <= LONGEST_S
            _require(fits, name, f"is {value} s; it must be above 0 and at most {LONGEST_S:g}")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is shown while the run goes on. `metrics.jsonl` is written each step whatever these say."""

    log_every: int = 10
    """Steps between lines on the terminal."""
    tensorboard: bool = False
    """Write TensorBoard events to RUN/tensorboard (needs the extra `nybble[tensorboard]`)."""
    wandb: str = ""
    """Project at Weights & Biases to log to (needs the extra `nybble[wandb]`); empty turns it off."""

    def __post_init__(self) -> None:
        _require(self.log_every >= 1, "log_every", f"is {self.log_every}; it must be at least 1 step")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Train a model from random weights."""

    preset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET")] = ""
    """Model to train, such as tiny or small."""
    recipe: str = "inkling"
    """Precision of every GEMM: the name of a built-in recipe (see `nybble recipes`), or a TOML file."""
    data: Path = Path("data/sotu")
    """Folder that `nybble prepare` wrote."""
    vocab_size: int = 0
    """Tokens that the model knows; 0 takes the vocabulary of the data."""
    out: Path | None = None
    """Run folder; left out, it is runs/PRESET-RECIPE."""
    seed: int = 0
    """Seed of the weights, the order of the data and the stochastic rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice. Losses are reproducible for a given number of threads."""
    compile: bool = False
    """Compile the whole model with torch.compile: minutes at the start of a run on a GPU."""
    graph: bool = False
    """On GPUs, each with the whole model: launch each forward and backward pass as a CUDA graph."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: same bits, less
    memory.
    """
    keep_activations: bool = False
    """Keep the outputs of the experts' gate and up as they are, where the recipe would compute them again in
    the backward pass: same bits, more memory, less time.
    """
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        _require(self.vocab_size >= 0, "vocab_size", f"is {self.vocab_size}; it must not be negative")
        _require(
            not (self.graph and self.compile), "graph", "and compile are two ways to one end; leave one out"
        )
        _require(self.threads >= 0, "threads", f"is {self.threads}; it must not be negative")
        _require(self.threads <= MOST_THREADS, "threads", f"is {self.threads}; the most is {MOST_THREADS}")
        _require(0 <= self.seed < 1 << 63, "seed", f"is {self.seed}; it must lie in [0, 2^63)")

    @property
    def run_folder(self) -> Path:
        if self.out is not None:
            return self.out
        return Path("runs") / f"{self.preset}-{Path(self.recipe).stem}"
