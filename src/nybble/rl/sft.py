"""Supervised fine-tuning on worked solutions, so that reinforcement learning has something to improve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from nybble import together
from nybble.analysis.plots import plot_loss
from nybble.checkpoints.hub import TrainedModel, load_model, save_model
from nybble.checkpoints.identity import digest
from nybble.data import TextTokenizer
from nybble.data.tokenizer import SMALLEST_VOCAB, train_tokenizer
from nybble.errors import ConfigError, DataError
from nybble.layers import convert
from nybble.models import presets
from nybble.pretrain import metrics
from nybble.pretrain.config import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimiserConfig,
    PretrainConfig,
    ScheduleConfig,
    ValidationConfig,
)
from nybble.pretrain.configfile import dump, flatten
from nybble.pretrain.device import numerics_status, pick_device
from nybble.pretrain.loop import IGNORE, train
from nybble.pretrain.runfolder import RunFolder, environment
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import open_sinks
from nybble.pretrain.stop import StopRequest
from nybble.recipes import load_recipe
from nybble.rl.problems import Problems
from nybble.rl.tasks import TaskConfig, find_task


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Fine-tune a model on worked solutions of a task."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """A run, a checkpoint or a folder with a model; or a preset, for random weights and tokens of bytes."""
    recipe: str = ""
    """Precision; empty takes the model's own, or inkling for a preset."""
    out: Path = Path("runs/sft")
    """Run folder."""
    seed: int = 0
    """Seed of random weights and of rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    task: TaskConfig = field(default_factory=TaskConfig)
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(batch=16, sequence=128, mask_documents=True)
    )
    optimiser: OptimiserConfig = field(default_factory=lambda: OptimiserConfig(lr=2e-3))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(steps=200))
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def session_config(self) -> PretrainConfig:
        """The settings that the loop of pretraining reads."""
        return PretrainConfig(
            preset="",
            recipe=self.recipe,
            out=self.out,
            seed=self.seed,
            device=self.device,
            threads=self.threads,
            batch=self.batch,
            optimiser=self.optimiser,
            schedule=self.schedule,
            validation=self.validation,
            checkpoint=self.checkpoint,
            log=self.log,
        )


class SolvedProblems:
    """Batches of prompts with their worked solutions, packed as documents; only solutions are targets.

    A batch is dict of int64 [B, S]: input_ids, labels (shifted, -100 is no target), doc_ids.
    """

    def __init__(self, problems: Problems, tokenizer: TextTokenizer, batch: BatchConfig) -> None:
        self.problems, self.tokenizer, self.batch = problems, tokenizer, batch
        self.next_problem = 0

    def __next__(self) -> dict[str, Tensor]:
        B, S = self.batch.batch, self.batch.sequence
        ids = np.full((B, S), self.tokenizer.pad_id, dtype=np.int64)
        labels = np.full((B, S), IGNORE, dtype=np.int64)
        docs = np.full((B, S), -1, dtype=np.int64)
        for row in range(B):
            start = document = 0
            while True:
                posed, following = self.problems.take(self.next_problem, 1)
                prompt = posed[0].tokens
                text = posed[0].problem.solution
                if not text:
                    raise DataError(f"task: problem {posed[0].index} has no worked solution to learn from")
                line = [*prompt, *self.tokenizer.encode(text), self.tokenizer.eot_id]
                size = len(line) - 1
                if size > S:
                    raise DataError(
                        f"problem {posed[0].index} and its solution take {size} tokens; raise --sequence, "
                        f"which is {S}"
                    )
                if start + size > S:
                    break  # it opens the next row
                ids[row, start : start + size] = line[:-1]
                labels[row, start + len(prompt) - 1 : start + size] = line[len(prompt) :]
                docs[row, start : start + size] = document
                start, document, self.next_problem = start + size, document + 1, following
        tensors = {"input_ids": ids, "labels": labels, "doc_ids": docs}
        return {name: torch.from_numpy(array) for name, array in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"next_problem": self.next_problem}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_problem = state["next_problem"]


def fine_tune(config: SFTConfig, *, resume: bool = False, overwrite: bool = False) -> int:
    """Trains, and returns the exit status, as `pretrain` does."""
    if together.launched():
        raise ConfigError("nybble sft runs in one process; start it without torchrun")
    device = pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    task = find_task(config.task)
    trained = starting_model(config, device)
    tokenizer = trained.tokenizer

    def data(held_out: bool) -> SolvedProblems:
        problems = Problems(task, tokenizer, config.batch.sequence, held_out=held_out)
        return SolvedProblems(problems, tokenizer, config.batch)

    def held_out() -> Iterator[dict[str, Tensor]]:
        batches = data(True)
        return (next(batches) for _ in range(config.validation.val_batches))

    train_data = data(False)
    next(data(False))  # a task that cannot be packed fails before the run folder is touched
    folder = RunFolder(config.out, resume=resume, overwrite=overwrite)
    session = Session(
        config=config.session_config(),
        run=folder,
        model=trained.model,
        train_data=train_data,
        held_out_data=held_out,
        identity={
            "model": digest(trained.model.config.to_dict())[:12],
            "recipe": trained.recipe.hash(),
            "tokenizer": tokenizer.sha256[:12],
            "task": dataclasses.asdict(config.task),
        },
        export=partial(_save_model, trained=trained, steps=config.schedule.steps),
        device=device,
    )
    try:
        if resume:
            session.restore()
        folder.write("config.toml", dump(dataclasses.replace(config, out=folder.path)))
        folder.write("env.json", environment(device, numerics_status(device)))
        folder.write("precision.txt", trained.report.table())
        print(trained.report.table())
        print(f"device  {numerics_status(device)}")
        print(
            f"task    {config.task.task}, level {config.task.level}; {config.schedule.steps} steps "
            f"to {folder.path}"
        )
        session.sinks += open_sinks(config.log, folder.path, flatten(config), session.step)
        with StopRequest() as stop:
            rows = train(session, stop)
        plot_loss(rows, folder.path / "plots" / "loss.png", title=f"fine-tuning on {config.task.task}")
        if session.step < config.schedule.steps:
            print(f"stopped: step {session.step} is saved; go on with --resume")
            return 128 + stop.signum
        print(
            f"done    held-out loss {rows[-1]['val_loss']:.4f} nats a token; "
            f"{metrics.duration(session.elapsed_s)}"
        )
        return 0
    finally:
        session.close()


def starting_model(config: SFTConfig, device: torch.device) -> TrainedModel:
    """The model of a folder, or a preset's with random weights, a vocabulary of bytes and its tokenizer."""
    if not config.model:
        raise ConfigError(
            f"model: name a run, a folder with a model, or a preset: {', '.join(presets.names())}"
        )
    if config.model not in presets.names():
        return load_model(Path(config.model), config.recipe, device)
    tokenizer = train_tokenizer([], SMALLEST_VOCAB)
    torch.manual_seed(config.seed)
    preset = presets.get(config.model)
    model = preset.model(
        preset.model_config(
            tokenizer.vocab_size,
            eos_token_id=tokenizer.eot_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_id,
        )
    ).to(device)
    recipe = load_recipe(config.recipe or "inkling")
    return TrainedModel(model, tokenizer, recipe, convert(model, recipe, steps=config.schedule.steps))


def _save_model(model: nn.Module, checkpoint: Path, *, trained: TrainedModel, steps: int) -> None:
    assert model is trained.model
    recipe = trained.recipe.at(trained.report.state.step, steps)
    save_model(checkpoint / "model", trained.model, trained.tokenizer, recipe)
