"""Puts a run of reinforcement learning together from its settings, and brings it to an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from nybble import together
from nybble.analysis.rl_plots import plot_rl
from nybble.checkpoints.export import ExportConfig, export
from nybble.checkpoints.hub import TrainedModel, load_model, save_model
from nybble.checkpoints.identity import digest
from nybble.errors import ConfigError, DataError
from nybble.parallel.launch import Start, check_agreement, joined, named_loss, rank_device
from nybble.parallel.watch import Watch
from nybble.pretrain import metrics
from nybble.pretrain.configfile import dump_run, flatten
from nybble.pretrain.device import numerics_status, pick_device
from nybble.pretrain.runfolder import RunFolder, environment
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import check_sinks, open_sinks
from nybble.pretrain.stop import StopRequest
from nybble.recipes import Recipe, load_recipe
from nybble.rl import rollout as files
from nybble.rl.collect import Collector
from nybble.rl.config import RLConfig
from nybble.rl.engine import Engine, OwnEngine
from nybble.rl.loop import Run, train
from nybble.rl.policy import Policy
from nybble.rl.position import Position
from nybble.rl.problems import Problems
from nybble.rl.rollout import Rollout
from nybble.rl.sampler import SamplingParams
from nybble.rl.tasks import find_task
from nybble.rl.update import Updater
from nybble.rl.vllm import VLLMEngine

SHOWN = 5
"""Steps at either end whose mean reward the last line shows: prompts differ from step to step."""


def reinforce(config: RLConfig, *, resume: bool = False, overwrite: bool = False) -> int:
    """Trains, and returns the exit status: 0 at the last step, 128 + signal for a run that a signal stopped.

    All that can be wrong with the settings is found before the run folder is touched.
    """
    if config.model == Path():
        raise ConfigError(
            "model: name a run (such as one of nybble sft), a checkpoint or a folder with a model"
        )
    device = rank_device(pick_device(config.device))
    check_sinks(config.log)
    if config.threads:
        torch.set_num_threads(config.threads)
    limits = config.session_config().parallel
    watch = Watch()
    with (
        joined(device, watch, slow_s=limits.slow_exchange, timeout_s=limits.exchange_limit) as start,
        named_loss(watch),
    ):
        resume, overwrite = start.manner(config.out, resume, overwrite)
        return _reinforce(config, device, start, resume=resume, overwrite=overwrite)


def _reinforce(config: RLConfig, device: torch.device, start: Start, *, resume: bool, overwrite: bool) -> int:
    task = find_task(config.task)
    trained = load_model(config.model, config.recipe, device)
    policy = make_policy(config, trained)
    longest = longest_prompt(config, trained)
    given = None if config.rollouts is None else read_groups(config.rollouts, trained)
    check_agreement({"settings": digest(flatten(config))[:12], "recipe": trained.recipe.hash()})
    if given is not None:
        steps = min(config.schedule.steps, len(given) // config.sampling.prompts)
        if steps == 0:
            raise DataError(
                f"{config.rollouts} has {len(given)} groups, fewer than the {config.sampling.prompts} of "
                "a step; lower --prompts"
            )
        config = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, steps=steps))

    folder = RunFolder(config.out, resume=resume, overwrite=overwrite)
    start.began()
    position = Position()
    session = Session(
        config=config.session_config(),
        run=folder,
        model=trained.model,
        train_data=position,
        held_out_data=lambda: (),
        identity=_identity(config, trained),
        export=partial(_save_model, trained=trained),
        device=device,
    )
    try:
        engine = _engine(config, policy, trained)
        collector = Collector(
            engine,
            trained.tokenizer,
            SamplingParams(
                max_new_tokens=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                seed=config.seed,
            ),
            config.sampling.group,
            config.sampling.rows,
        )
        updater = Updater(config, session, policy, trained.tokenizer.pad_id)
        if config.loss.kl > 0:
            updater.keep_reference()
        restored = session.restore() if resume else None
        together.on_main(lambda: _drop_rollouts(folder.path, session.step if resume else -1))
        run = Run(
            config=config,
            session=session,
            policy=policy,
            position=position,
            collector=collector,
            problems=Problems(task, trained.tokenizer, longest),
            held_out=Problems(task, trained.tokenizer, longest, held_out=True),
            updater=updater,
            given=given,
        )
        folder.write("config.toml", dump_run(dataclasses.replace(config, out=folder.path), "rl"))
        folder.write("env.json", environment(device, numerics_status(device), together.world()))
        folder.write("precision.txt", policy.table())
        folder.write("recipe.toml", trained.recipe.to_toml())
        _introduce(run, trained, restored, numerics_status(device))
        if together.is_main():
            session.sinks += open_sinks(config.log, folder.path, flatten(config), session.step)
        with StopRequest() as stop:
            rows = train(run, stop)
        return together.on_main(lambda: _conclude(run, rows, stop))
    finally:
        session.close()


def make_policy(config: RLConfig, trained: TrainedModel) -> Policy:
    """The model in the two stages of its recipe; --sample-recipe gives the sampler another one."""
    sample = load_recipe(config.sample_recipe) if config.sample_recipe else trained.recipe
    return Policy(
        trained.model,
        sample.stage("sample"),
        trained.recipe.stage("train"),
        config.seed,
        invariant=config.batch_invariant,
    )


def longest_prompt(config: RLConfig, trained: TrainedModel) -> int:
    """Prompt tokens that leave room for the longest completion in the model's window."""
    window = trained.model.config.max_position_embeddings
    if config.sampling.max_new_tokens >= window:
        raise ConfigError(
            f"max_new_tokens is {config.sampling.max_new_tokens}, but the model's window is {window} tokens"
        )
    return window - config.sampling.max_new_tokens


def read_groups(path: Path, trained: TrainedModel) -> list[list[Rollout]]:
    """The groups of a file of rollouts, checked against the model."""
    found = list(files.groups(files.read(path)))
    vocabulary = trained.tokenizer.vocab_size
    for group in found:
        for rollout in group:
            worst = max((*rollout.prompt_tokens, *rollout.tokens))
            mine = trained.tokenizer.sha256[:12]
            if worst >= vocabulary or (rollout.tokenizer and rollout.tokenizer != mine):
                raise DataError(
                    f"{path}: its tokens are of tokenizer {rollout.tokenizer or '(unknown)'}, the model's is "
                    f"{mine} with {vocabulary} tokens; use the model that the rollouts were sampled from"
                )
    return found


def _engine(config: RLConfig, policy: Policy, trained: TrainedModel) -> Engine:
    stop = frozenset({trained.tokenizer.eot_id})
    if config.engine.engine == "own":
        return OwnEngine(policy, stop)
    if together.active():
        raise ConfigError("engine: with a server one process trains; leave out torchrun")

    def write_weights(folder: Path) -> None:
        whole = folder.with_name("whole")
        save_model(whole, trained.model, trained.tokenizer, trained.recipe.stage("sample"))
        export(ExportConfig(checkpoint=whole, out=folder, progress=False))

    return VLLMEngine(config.engine, stop, trained.tokenizer.vocab_size, write_weights, config.seed)


def _identity(config: RLConfig, trained: TrainedModel) -> dict[str, Any]:
    return {
        "model": digest(trained.model.config.to_dict())[:12],
        "tokenizer": trained.tokenizer.sha256[:12],
        "recipe": trained.recipe.hash(),
        "sample_recipe": _hash(config.sample_recipe),
        "task": dataclasses.asdict(config.task),
    }


def _hash(recipe: str) -> str:
    found: Recipe | None = load_recipe(recipe) if recipe else None
    return found.hash() if found else ""


def _save_model(model: nn.Module, checkpoint: Path, *, trained: TrainedModel) -> None:
    assert model is trained.model
    save_model(checkpoint / "model", trained.model, trained.tokenizer, trained.recipe)


def _drop_rollouts(run: Path, step: int) -> None:
    """Deletes rollouts of policies beyond `step`, which this run has yet to reach: they are from before."""
    for path in (run / "rollouts").glob("step_*.jsonl"):
        if int(path.name[5:13]) > step:
            path.unlink()


def _introduce(run: Run, trained: TrainedModel, restored: Path | None, status: str) -> None:
    config, policy = run.config, run.policy
    parameters = sum(p.numel() for p in trained.model.parameters())
    print(policy.table())
    print(f"device  {status}")
    print(f"model   {config.model}, {parameters / 1e6:.1f} M parameters")
    what = f"task    {config.task.task}, level {config.task.level}"
    source = f"rollouts of {config.rollouts}" if config.rollouts else f"{config.sampling.prompts} prompts"
    print(f"{what}; a step is {source} x {config.sampling.group} completions")
    if config.engine.engine == "vllm":
        print("the server samples by arithmetic of its own: k3 says how far it is from the trainer")
    elif policy.differing:
        print(f"sampler and trainer differ in {len(policy.differing)} modules, such as {policy.differing[0]}")
    else:
        exact = ", batch-invariant: k3 is exactly 0 on policy" if policy.invariant else ""
        print(f"sampler and trainer have the same forward pass{exact}")
    print(f"run     {run.session.run.path}, {config.schedule.steps} steps")
    if restored is not None:
        part = f" after {run.position.update} updates of a step" if run.position.update else ""
        print(f"resume  from {restored}{part}")


def _conclude(run: Run, rows: Sequence[dict[str, Any]], stop: StopRequest) -> int:
    """Plot, last line and status."""
    config, session = run.config, run.session
    plots = session.run.path / "plots" / "rl.png"
    if rows:
        plot_rl(
            rows,
            plots,
            title=f"{config.task.task}, level {config.task.level}, recipe {config.recipe or 'own'}",
        )
    if session.step < config.schedule.steps:
        print(f"stopped: step {session.step} is saved; go on with --resume")
        return 128 + stop.agreed
    few = min(SHOWN, len(rows))
    first, last = (fmean(row["reward"] for row in part) for part in (rows[:few], rows[-few:]))
    shown = f"mean reward {first:.3f} in the first {few} steps, {last:.3f} in the last"
    if "eval_reward" in rows[-1]:
        # A run may have begun without evaluations.
        before = rows[0].get("eval_reward_before")
        shown += "; held out, greedy " + ("" if before is None else f"{before:.3f} before, ")
        shown += f"{rows[-1]['eval_reward']:.3f} after"
    print(f"done    {shown}; {metrics.duration(session.elapsed_s)}; {plots}")
    return 0
