"""`nybble export`: the four-bit weights that the forward pass used, to the bit, as a folder that serving
programs load.

The master weights are quantised by the same op as in the forward pass, so that codes and scales are the
trainer's. One chunk of experts is in memory at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from nybble.checkpoints import plan
from nybble.checkpoints.dialects import WRITABLE, Dialect, detect
from nybble.checkpoints.engine import Job, write_model
from nybble.checkpoints.header import check_folder
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.sidecar import Sidecar
from nybble.checkpoints.source import find_units
from nybble.checkpoints.store import latest
from nybble.checkpoints.writer import shard_bytes, whole_model
from nybble.errors import CheckpointError
from nybble.recipes import Recipe, load_recipe

COPIED: tuple[str, ...] = (
    "tokenizer*",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
)
COPIED += (
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "preprocessor_config.json",
    "recipe.toml",
    "precision.txt",
)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and how."""

    checkpoint: tyro.conf.Positional[Path]
    """A run folder (its newest checkpoint), a checkpoint folder, or a transformers folder."""
    out: Path
    """The folder to write. It appears when it is whole."""
    format: str = "compressed-tensors"
    """Dialect: compressed-tensors, modelopt or inkling2."""
    scheme: Literal["w4a16", "w4a4"] = "w4a16"
    """w4a16 quantises weights only; w4a4 has the server quantise activations too, without calibration."""
    recipe: str | None = None
    """The recipe of training: name or TOML file. Default: the recipe.toml beside the weights."""
    linears: Literal["bf16", "recipe"] = "bf16"
    """Whether linears outside the experts are BF16 or in what the recipe's forward pass used."""
    rest: Literal["bf16", "keep"] = "bf16"
    """Type of all that is not quantised; keep leaves it as it is, such as FP32 masters."""
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""
    overwrite: bool = False
    """Replace `out` if it exists."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        dialect_of(self.format)
        shard_bytes(self.max_shard_gb)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    out: Path
    formats: dict[str, str]
    """Format by module of everything quantised."""
    reused: int
    """Matrices whose imported codes were written unchanged."""
    bytes_read: int
    bytes_written: int

    def text(self) -> str:
        """One line a person reads."""
        counts = {
            name: list(self.formats.values()).count(name) for name in dict.fromkeys(self.formats.values())
        }
        what = ", ".join(f"{count} modules in {name}" for name, count in counts.items())
        kept = f", {self.reused} matrices with their imported codes" if self.reused else ""
        return (
            f"{self.out}: {what}{kept}; {self.bytes_written / 1e9:.3f} GB from "
            f"{self.bytes_read / 1e9:.3f} GB "
            f"({self.bytes_written / max(self.bytes_read, 1):.0%})"
        )


def export(config: ExportConfig) -> ExportReport:
    """Write the four-bit checkpoint.

    Raises:
        CheckpointError: nothing to export, an unknown recipe or dialect, a width that no block divides, a bad
            file, a full
            disk. `config.out` is then untouched.
    """
    path = model_folder(config.checkpoint)
    folder = open_dense(path)
    units = find_units(folder)
    sidecar = Sidecar.of(path)
    recipe = _recipe(config, path)
    if recipe is not None:
        formats = plan.from_recipe(recipe, units, config.linears == "recipe")
    elif sidecar is not None:
        formats = sidecar.formats(units)
    else:
        raise CheckpointError(
            f"{path}: no recipe.toml beside the weights; name the recipe of training with --recipe"
        )
    if not formats:
        name = "its imported codes" if recipe is None else f"the recipe {recipe.name}"
        raise CheckpointError(f"{path}: {name} quantises no weight of this model; there is nothing to export")
    dialect = dialect_of(config.format, config.scheme)
    plan.check(units, formats, dialect)
    job = Job(
        folder=folder,
        units=units,
        formats=formats,
        dialect=dialect,
        rest=config.rest,
        max_shard_bytes=shard_bytes(config.max_shard_gb),
        sidecar=sidecar,
        progress="export" if config.progress else None,
    )
    return write_folder(job, config.out, config.overwrite)


def write_folder(job: Job, out: Path, overwrite: bool) -> ExportReport:
    """The whole folder of a job: weights, configs, tokeniser."""
    with whole_model(out, job.folder.path, overwrite) as part:
        result = write_model(job, part)
        copy_files(job.folder.path, part)
    return ExportReport(
        out=out,
        formats=dict(job.formats),
        reused=result.reused,
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
    )


def dialect_of(name: str, scheme: str = "w4a16") -> Dialect:
    """Raises CheckpointError for a dialect that cannot be written."""
    if name not in WRITABLE:
        raise CheckpointError(f"unknown dialect {name!r}; choose {', '.join(WRITABLE)}")
    return WRITABLE[name](activations=scheme == "w4a4")


def model_folder(path: Path) -> Path:
    """The transformers folder meant by a run, a checkpoint or the folder itself."""
    check_folder(path)
    if (path / "checkpoints").is_dir():
        newest = latest(path / "checkpoints")
        if newest is None:
            raise CheckpointError(f"{path} holds no whole checkpoint")
        path = newest
    return path / "model" if (path / "model").is_dir() else path


def open_dense(path: Path) -> Folder:
    """A folder in high precision. Raises CheckpointError if it is quantised already."""
    folder = Folder.open(path)
    dialect = detect(folder)
    if dialect is not None:
        raise CheckpointError(
            f"{path}: is quantised already ({dialect.name}); run `nybble import` on it first"
        )
    return folder


def copy_files(source: Path, out: Path) -> None:
    """Tokeniser, generation config and recipe."""
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, out / path.name)


def _recipe(config: ExportConfig, path: Path) -> Recipe | None:
    if config.recipe is not None:
        return load_recipe(config.recipe)
    places: list[Any] = [path / "recipe.toml"]
    if path.name == "model":
        places += [path.parent / "recipe.toml", path.parent.parent.parent / "recipe.toml"]
    return next((load_recipe(place) for place in places if place.is_file()), None)
