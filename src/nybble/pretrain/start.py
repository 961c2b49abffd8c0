"""Puts a run together from its settings, and brings it to an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nybble import together
from nybble.analysis.plots import plot_loss
from nybble.checkpoints.hub import save_model
from nybble.checkpoints.identity import digest
from nybble.data import Dataset, Loader
from nybble.errors import ConfigError
from nybble.layers import Report
from nybble.models import CausalLM, presets
from nybble.parallel import Mesh, Monitor, convert, make_mesh, shard
from nybble.parallel.launch import Start, check_agreement, joined, named_loss, rank_device
from nybble.pretrain import metrics
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import dump_run, flatten
from nybble.pretrain.device import numerics_status, pick_device
from nybble.pretrain.loop import train
from nybble.pretrain.runfolder import RunFolder, environment
from nybble.pretrain.session import Session
from nybble.pretrain.sinks import check_sinks, open_sinks
from nybble.pretrain.stop import StopRequest
from nybble.recipes import Recipe, load_recipe

Finish = Callable[[CausalLM], None]
"""What to do with a model whose run has ended."""


def pretrain(
    config: PretrainConfig, *, resume: bool = False, overwrite: bool = False, finish: Finish | None = None
) -> int:
    """Trains, and returns the exit status: 0 at the last step, 128 + signal for a run that a signal stopped.

    All that can be wrong with the settings is found before the run folder is touched. `finish` gets the model
    after the last step.
    """
    device = rank_device(pick_device(config.device))
    if config.graph and device.type != "cuda":
        raise ConfigError("graph works on GPUs; leave it out")
    check_sinks(config.log)
    if config.threads:
        torch.set_num_threads(config.threads)
    monitor, exchanges = Monitor(), config.parallel
    limits = {"slow_s": exchanges.slow_exchange, "timeout_s": exchanges.exchange_limit}
    with joined(device, monitor.watch, **limits) as start:
        resume, overwrite = start.manner(config.run_folder, resume, overwrite)
        return _pretrain(config, device, monitor, start, resume=resume, overwrite=overwrite, finish=finish)


def _pretrain(
    config: PretrainConfig,
    device: torch.device,
    monitor: Monitor,
    start: Start,
    *,
    resume: bool,
    overwrite: bool,
    finish: Finish | None,
) -> int:
    dataset = Dataset.open(config.data)
    recipe = load_recipe(config.recipe)
    settings = digest({k: v for k, v in flatten(config).items() if k not in ("data", "out", "threads")})
    check_agreement({"recipe": recipe.hash(), "data": dataset.sha256, "settings": settings[:12]})
    train_data, held_out = _loaders(config, dataset)
    mesh = _mesh(config, device)
    model, report = build_model(config, dataset, recipe, device, mesh, monitor)
    run = RunFolder(config.run_folder, resume=resume, overwrite=overwrite)
    start.began()
    session = Session(
        config=config,
        run=run,
        model=model,
        train_data=train_data,
        held_out_data=held_out,
        identity=_identity(model, recipe, dataset),
        export=partial(_export, dataset=dataset, report=report, steps=config.schedule.steps),
        device=device,
        monitor=monitor,
        copies=mesh is not None and mesh.copies,
    )
    try:
        restored = session.restore() if resume else None
        numerics = numerics_status(device)
        run.write("config.toml", dump_run(dataclasses.replace(config, out=run.path), "pretrain"))
        run.write("env.json", environment(device, numerics, together.world()))
        run.write("precision.txt", report.table())
        run.write("recipe.toml", recipe.to_toml())
        _introduce(session, report, mesh, dataset, numerics, restored, resume)
        if together.is_main():
            session.sinks += open_sinks(config.log, run.path, flatten(config), session.step)
        with StopRequest() as stop, named_loss(monitor.watch):
            rows = train(session, stop)
        status = together.on_main(lambda: _conclude(session, rows, dataset, stop))
        if finish is not None and status == 0:
            finish(model)
        return status
    finally:
        session.close()


def build_model(
    config: PretrainConfig,
    dataset: Dataset,
    recipe: Recipe,
    device: torch.device,
    mesh: Mesh | None = None,
    monitor: Monitor | None = None,
) -> tuple[CausalLM, Report]:
    """The preset's model with random weights, converted, and sharded over the ranks of `mesh`; the same
    weights for a seed on every device and any number of ranks."""
    vocabulary = config.vocab_size or dataset.vocab_size
    dataset.check_model_vocab(vocabulary)
    preset = presets.get(config.preset)
    model_config = preset.model_config(
        vocabulary,
        eos_token_id=dataset.eot_id,
        bos_token_id=None,
        pad_token_id=dataset.tokenizer.pad_id,
    )
    torch.manual_seed(config.seed)
    model = preset.model(model_config)
    if recipe.masters == "bf16":
        model.to(torch.bfloat16)
    model.to(device)
    steps, legs = config.schedule.steps, config.parallel.legs
    if config.keep_activations:
        recipe = dataclasses.replace(recipe, keep="activations")
    report = convert(model, recipe, steps=steps, mesh=mesh, monitor=monitor, legs=legs)
    model.checkpoint_layers(config.activation_checkpointing)
    if config.compile:
        model.compile()
    if mesh is not None and not mesh.copies:
        gather, reshard = config.parallel.gather, config.parallel.reshard
        shard(model, mesh, gather=gather, reshard=reshard, monitor=monitor)
    return model, report


def _mesh(config: PretrainConfig, device: torch.device) -> Mesh | None:
    """How the ranks share the model; None for one process."""
    if not together.active():
        return None
    shape = presets.get(config.preset).model_config(eos_token_id=None)
    mesh = make_mesh(
        device.type,
        experts=getattr(shape, "n_routed_experts", 0),
        expert_parallel=config.parallel.expert_parallel,
        replicate=config.parallel.replicate,
    )
    for name in ("graph", "compile"):
        if getattr(config, name) and not mesh.copies:
            raise ConfigError(
                f"{name} works with several ranks only where each has the whole model: add --replicate "
                f"{together.world()}, or leave out --{name}"
            )
    if mesh.copies and config.parallel.gather != "fp32":
        raise ConfigError(
            f"gather {config.parallel.gather} has nothing to gather: each rank has the whole model; "
            "leave it out"
        )
    return mesh


def _loaders(config: PretrainConfig, dataset: Dataset) -> tuple[Loader, Any]:
    world = together.world()
    if config.batch.batch % world:
        raise ConfigError(
            f"batch is {config.batch.batch} sequences, which {world} ranks cannot share out equally"
        )
    shape = {"batch_size": config.batch.batch, "seq_len": config.batch.sequence, "seed": config.seed}
    shape |= {"rank": together.rank(), "world": world}
    train_data = Loader(dataset, "train", doc_ids=config.batch.mask_documents, **shape)
    domains = {name.removeprefix("val-"): name for name in dataset.splits if name.startswith("val-")}
    held_out = {
        name: partial(
            Loader(dataset, split, doc_ids=config.batch.mask_documents, **shape).eval_batches,
            config.validation.val_batches,
        )
        for name, split in (domains or {"": "val"}).items()
    }
    return train_data, held_out


def _identity(model: CausalLM, recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    architecture = {k: v for k, v in model.config.to_dict().items() if k != "transformers_version"}
    return {
        "model": {
            k: v if isinstance(v, int | float | str | bool) else digest(v)[:12]
            for k, v in architecture.items()
        },
        "recipe": recipe.hash(),
        "data": dataset.sha256,
    }


def _export(model: CausalLM, checkpoint: Path, *, dataset: Dataset, report: Report, steps: int) -> None:
    """The model with the precision of its last step, which is what samplers and servers compute with."""
    save_model(checkpoint / "model", model, dataset.tokenizer, report.recipe.at(report.state.step, steps))


def _introduce(
    session: Session,
    report: Report,
    mesh: Mesh | None,
    dataset: Dataset,
    status: str,
    restored: Path | None,
    resume: bool,
) -> None:
    config = session.config
    parameters = sum(p.numel() for p in session.model.parameters())
    tokens = config.schedule.steps * config.batch.tokens_per_step
    print(report.table())
    print(f"device  {status}")
    if mesh is not None:
        print(f"ranks   {mesh.text()}")
    print(f"model   {config.preset}, {parameters / 1e6:.1f} M parameters")
    if isinstance(session.model, CausalLM) and (note := session.model.status()):
        print(f"        {note}")
    print(
        f"data    {dataset.folder}: {len(dataset.shards('train'))} tokens to train on, "
        f"unigram entropy of the held-out text {dataset.splits['val'].unigram_entropy:.4f} nats a token"
    )
    print(f"run     {session.run.path}, {config.schedule.steps} steps, {tokens} tokens")
    if restored is not None:
        print(f"resume  from {restored}")
    elif resume:
        print("resume  no checkpoint was saved yet, so from the first step")


def _conclude(session: Session, rows: list[dict[str, Any]], dataset: Dataset, stop: StopRequest) -> int:
    """Plot, last lines and status."""
    config, run = session.config, session.run
    unigram = dataset.splits["val"].unigram_entropy
    title = f"{config.preset}, recipe {config.recipe}, {dataset.source}"
    plot_loss(rows, run.path / "plots" / "loss.png", title=title, unigram_entropy=unigram)
    if session.step < config.schedule.steps:
        saved = "is saved; go on with --resume" if config.checkpoint.keep else "was not saved, as keep 0 says"
        print(f"stopped: step {session.step} {saved}")
        return 128 + stop.agreed
    final = rows[-1]
    gap = unigram - final["val_loss"]
    print(
        f"done    validation loss {final['val_loss']:.4f} nats a token, {abs(gap):.4f} "
        f"{'below' if gap >= 0 else 'ABOVE'} the unigram entropy {unigram:.4f}; "
        f"{metrics.duration(session.elapsed_s)}; {run.path}/plots/loss.png"
    )
    return 0
