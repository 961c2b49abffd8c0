"""The folder of a trained model: transformers loads it, and it says in which precision it was trained.

config.json, generation_config.json, model.safetensors    as transformers writes them
tokenizer.json, tokenizer_config.json                     for AutoTokenizer
recipe.toml                                               precision of every GEMM
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from nybble import together
from nybble.checkpoints.dialects import detect
from nybble.checkpoints.header import read_json
from nybble.checkpoints.manifest import NAME, read_manifest, verify
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.store import latest
from nybble.data import TextTokenizer, load_tokenizer
from nybble.errors import CheckpointError
from nybble.layers import Report, convert
from nybble.models import CausalLM
from nybble.models.families import FAMILIES, Family
from nybble.recipes import Recipe, load_recipe


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to compute with the precision it was trained in."""

    model: CausalLM
    tokenizer: TextTokenizer
    recipe: Recipe
    report: Report


def save_model(folder: Path, model: CausalLM, tokenizer: TextTokenizer, recipe: Recipe) -> None:
    """Writes the folder. Of several ranks all call it, rank 0 writes, from the shards of all."""
    weights = _whole_weights(model) if together.active() else None

    def write() -> None:
        with _quiet():
            model.save_pretrained(folder, state_dict=weights)
        tokenizer.save(folder)
        (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")

    together.on_main(write)


def _whole_weights(model: CausalLM) -> dict[str, Tensor]:
    """Every weight whole and in the memory of the host, on rank 0 alone; one after the other is gathered."""
    whole: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if together.is_main():
            whole[name] = full.detach().cpu()
    return whole


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the bar and the report of transformers for every folder it writes or reads out of the output."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def find_model(path: Path) -> Path:
    """The model folder that a run, a checkpoint or the folder itself stands for; checked if it has checksums.

    Raises CheckpointError if there is none, or if a file of the checkpoint is damaged.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name a run, a checkpoint or a folder with a model")
    checkpoint = path
    if (path / "checkpoints").is_dir():
        newest = latest(path / "checkpoints")
        if newest is None:
            raise CheckpointError(f"{path} holds no whole checkpoint yet")
        checkpoint = newest
    if (checkpoint / NAME).is_file():
        manifest = read_manifest(checkpoint)
        verify(checkpoint, manifest)
        return checkpoint / "model"
    if (path / "config.json").is_file():
        return path
    raise CheckpointError(
        f"{path} is no run, no checkpoint and no folder with a model (it has no config.json)"
    )


def load_model(path: Path, recipe: str = "", device: torch.device | None = None) -> TrainedModel:
    """Loads the model of a run, a checkpoint or a folder, and converts it with its own recipe or another.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    folder = find_model(path)
    own, config = folder / "recipe.toml", read_json(folder / "config.json")
    packed = "quantization_config" in config
    if not packed and any(folder.glob("*.safetensors")):  # whose headers and index must be sound
        packed = detect(Folder.open(folder)) is not None
    if packed:
        raise CheckpointError(
            f"{folder} holds quantised weights for serving programs; bring them back with "
            f"nybble import {folder} --out NEW, and name NEW"
        )
    if not recipe and not own.is_file():
        raise CheckpointError(
            f"{folder} has no recipe.toml; name the precision with --recipe, such as --recipe bf16"
        )
    chosen = load_recipe(recipe or own)
    tokenizer = load_tokenizer(folder)
    kind = _known_family(folder, str(config.get("model_type")))
    model = _from_pretrained(kind, folder)
    if tokenizer.vocab_size > model.vocabulary:
        raise CheckpointError(
            f"{folder}: the tokeniser has {tokenizer.vocab_size} tokens, the model only {model.vocabulary}"
        )
    model.to(device or torch.device("cpu"))
    report = convert(model, chosen)
    return TrainedModel(model=model.eval(), tokenizer=tokenizer, recipe=chosen, report=report)


def _from_pretrained(kind: Family, folder: Path) -> CausalLM:
    try:
        with _quiet():
            model, info = kind.model_class.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if "ignore_mismatched_sizes" in str(error):
            error = ValueError("its weights have other shapes than its config.json says")
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from None
    if missing := sorted(info["missing_keys"]):  # transformers gives them random values
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the model's weights, such as {missing[0]}; copy it again"
        )
    return model


def _known_family(folder: Path, model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{folder} is a model of type {model_type!r}; the commands run those of {', '.join(FAMILIES)}. "
            "Others can be given a recipe in a training loop of your own: nybble.convert(model, recipe)"
        )
    return FAMILIES[model_type]
