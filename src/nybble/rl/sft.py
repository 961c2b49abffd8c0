"""Supervised fine-tuning on worked solutions, so that reinforcement learning has something to improve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

from nybble import together
from nybble.analysis.plots import plot_loss
from nybble.checkpoints.hub import TrainedModel, load_model, save_model
from nybble.checkpoints.identity import digest
from nybble.data.tokenizer import SMALLEST_VOCAB, train_tokenizer
from nybble.errors import ConfigError
from nybble.models import presets
from nybble.parallel import Monitor, convert, make_mesh, shard
from nybble.parallel.launch import Start, check_agreement, joined, named_loss, rank_device
from nybble.pretrain import metrics
from nybble.pretrain.config import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimiserConfig,
    ParallelConfig,
    PretrainConfig,
    ScheduleConfig,
    ValidationConfig,
)
from nybble.pretrain.configfile import dump_run, flatten
from nybble.pretrain.device import numerics_status, pick_device
from nybble.pretrain.loop import train
from nybble.pretrain.runfolder import RunFolder, environment
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import check_sinks, open_sinks
from nybble.pretrain.stop import StopRequest
from nybble.recipes import load_recipe
from nybble.rl.problems import Problems
from nybble.rl.solved import SolvedProblems
from nybble.rl.tasks import TaskConfig, choose_solution, find_task, parse_styles


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
    styles: str = ""
    """Mix of solutions, such as worked=1,direct=3, for a task that has several styles; empty takes the
    worked one alone.
    """
    task: TaskConfig = field(default_factory=TaskConfig)
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(batch=16, sequence=128, mask_documents=True)
    )
    optimiser: OptimiserConfig = field(default_factory=lambda: OptimiserConfig(lr=2e-3))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(steps=200))
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        parse_styles(self.styles)
        self.session_config()  # whose checks hold here too

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
            parallel=self.parallel,
            log=self.log,
        )


def fine_tune(config: SFTConfig, *, resume: bool = False, overwrite: bool = False) -> int:
    """Trains, and returns the exit status, as `pretrain` does; of several ranks each takes a share of the
    rows and of the model."""
    device = rank_device(pick_device(config.device))
    check_sinks(config.log)
    if config.threads:
        torch.set_num_threads(config.threads)
    monitor, limits = Monitor(), config.parallel
    watched = {"slow_s": limits.slow_exchange, "timeout_s": limits.exchange_limit}
    with joined(device, monitor.watch, **watched) as start:
        resume, overwrite = start.manner(config.out, resume, overwrite)
        return _fine_tune(config, device, monitor, start, resume=resume, overwrite=overwrite)


def _fine_tune(
    config: SFTConfig,
    device: torch.device,
    monitor: Monitor,
    start: Start,
    *,
    resume: bool,
    overwrite: bool,
) -> int:
    task = find_task(config.task)
    trained = starting_model(config, device)
    tokenizer = trained.tokenizer
    check_agreement({"settings": digest(flatten(config))[:12], "recipe": trained.recipe.hash()})
    solution = partial(choose_solution, weights=parse_styles(config.styles), seed=config.task.task_seed)

    def data(held_out: bool) -> SolvedProblems:
        problems = Problems(task, tokenizer, config.batch.sequence, held_out=held_out)
        return SolvedProblems(problems, tokenizer, config.batch, solution)

    def held_out() -> Iterator[dict[str, Tensor]]:
        batches = data(True)
        return (next(batches) for _ in range(config.validation.val_batches))

    train_data = data(False)
    next(data(False))  # a task that cannot be packed fails before the run folder is touched
    trained = share_out(config, trained, device, monitor)
    folder = RunFolder(config.out, resume=resume, overwrite=overwrite)
    start.began()
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
            "styles": parse_styles(config.styles),
        },
        export=partial(_save_model, trained=trained, steps=config.schedule.steps),
        device=device,
        monitor=monitor,
    )
    try:
        if resume:
            session.restore()
        folder.write("config.toml", dump_run(dataclasses.replace(config, out=folder.path), "sft"))
        folder.write("env.json", environment(device, numerics_status(device), together.world()))
        folder.write("precision.txt", trained.report.table())
        folder.write("recipe.toml", trained.recipe.to_toml())
        print(trained.report.table())
        print(f"device  {numerics_status(device)}")
        print(
            f"task    {config.task.task}, level {config.task.level}"
            f"{', ' + config.styles if config.styles else ''}; {config.schedule.steps} steps to {folder.path}"
        )
        if together.is_main():
            session.sinks += open_sinks(config.log, folder.path, flatten(config), session.step)
        with StopRequest() as stop, named_loss(monitor.watch):
            rows = train(session, stop)
        return together.on_main(lambda: _conclude(config, session, rows, stop))
    finally:
        session.close()


def share_out(
    config: SFTConfig, trained: TrainedModel, device: torch.device, monitor: Monitor
) -> TrainedModel:
    """The model with its experts and weights shared out among the ranks; as it is in one process."""
    if not together.active():
        return trained
    mesh = make_mesh(
        device.type,
        experts=getattr(trained.model.config, "n_routed_experts", 0),
        expert_parallel=config.parallel.expert_parallel,
        replicate=config.parallel.replicate,
    )
    steps, legs = config.schedule.steps, config.parallel.legs
    report = convert(trained.model, trained.recipe, steps=steps, mesh=mesh, monitor=monitor, legs=legs)
    gather, reshard = config.parallel.gather, config.parallel.reshard
    shard(trained.model, mesh, gather=gather, reshard=reshard, monitor=monitor)
    print(f"ranks   {mesh.text()}")
    return dataclasses.replace(trained, report=report)


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


def _conclude(config: SFTConfig, session: Session, rows: list[dict[str, Any]], stop: StopRequest) -> int:
    """Plot, last line and status."""
    plot = session.run.path / "plots" / "loss.png"
    plot_loss(rows, plot, title=f"fine-tuning on {config.task.task}")
    if session.step < config.schedule.steps:
        print(f"stopped: step {session.step} is saved; go on with --resume")
        return 128 + stop.agreed
    took = metrics.duration(session.elapsed_s)
    print(f"done    held-out loss {rows[-1]['val_loss']:.4f} nats a token; {took}")
    return 0


def _save_model(model: nn.Module, checkpoint: Path, *, trained: TrainedModel, steps: int) -> None:
    assert model is trained.model
    recipe = trained.recipe.at(trained.report.state.step, steps)
    save_model(checkpoint / "model", trained.model, trained.tokenizer, recipe)
