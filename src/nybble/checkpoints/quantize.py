"""`nybble quantize`: the same writers for a model that was trained in high precision, with the error of each
layer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import tyro
from torch import Tensor, float64

from nybble.checkpoints import plan
from nybble.checkpoints.engine import Job
from nybble.checkpoints.export import ExportReport, dialect_of, model_folder, open_dense, write_folder
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.source import find_units
from nybble.checkpoints.writer import shard_bytes
from nybble.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """What to quantise, and how."""

    model: tyro.conf.Positional[Path]
    """A transformers folder in FP32, BF16 or FP16."""
    out: Path
    """The folder to write. It appears when it is whole."""
    format: str = "compressed-tensors"
    """Dialect: compressed-tensors, modelopt or inkling2."""
    weights: str = "nvfp4"
    """Format of the weights: nvfp4, nvfp4-4over6, mxfp4 or mxfp8."""
    scheme: Literal["w4a16", "w4a4"] = "w4a16"
    """w4a16 quantises weights only; w4a4 has the server quantise activations too, without calibration."""
    scope: Literal["auto", "experts", "all"] = "auto"
    """experts quantises routed experts, all every linear but heads and routers; auto is experts where there
    are any.
    """
    last_mxfp8: str = "0"
    """Fraction of the layers, from the last back, whose weights are MXFP8: 1/6 is the split of the inkling
    recipe.
    """
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""
    overwrite: bool = False
    """Replace `out` if it exists."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        shard_bytes(self.max_shard_gb)
        try:
            share = Fraction(self.last_mxfp8)
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 <= share <= 1:
            raise CheckpointError(
                f"last_mxfp8 is {self.last_mxfp8!r}; write a fraction from 0 to 1, such as 1/6"
            )


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """What was written, and how far it is from the original."""

    written: ExportReport
    errors: dict[str, float]
    """Relative squared error |Q(W) - W|^2 / |W|^2 by module, its matrices together."""

    def text(self) -> str:
        """A table a person reads: one line a module, the mean last."""
        width = max(len(module) for module in self.errors)
        lines = [f"{'module'.ljust(width)}  format         relative squared error"]
        for module, error in self.errors.items():
            lines.append(f"{module.ljust(width)}  {self.written.formats[module]:13}  {error:.5f}")
        mean = sum(self.errors.values()) / len(self.errors)
        lines.append(f"{'mean'.ljust(width)}  {'':13}  {mean:.5f}")
        return "\n".join([*lines, self.written.text()])


def quantize_model(config: QuantizeConfig) -> QuantizeReport:
    """Quantise a folder's weights and write them in a dialect.

    Raises:
        CheckpointError: nothing to quantise, an unknown format or dialect, a width that no block divides, a
            bad file.
    """
    path = model_folder(config.model)
    folder = open_dense(path)
    units = find_units(folder)
    formats = plan.uniform(units, config.weights, config.scope, Fraction(config.last_mxfp8))
    if not formats:
        raise CheckpointError(f"{path}: has no weights in the scope {config.scope!r}; try --scope all")
    dialect = dialect_of(config.format, config.scheme)
    plan.check(units, formats, dialect)
    squares: dict[str, list[float]] = {}
    lock = threading.Lock()

    def observe(module: str, weight: Tensor, packed: Packed) -> None:
        original = weight.float()
        error = (packed.decode() - original).square_().sum(dtype=float64)
        norm = original.square().sum(dtype=float64)
        with lock:
            sums = squares.setdefault(module, [0.0, 0.0])
            sums[0] += float(error)
            sums[1] += float(norm)

    job = Job(
        folder=folder,
        units=units,
        formats=formats,
        dialect=dialect,
        rest="bf16",
        max_shard_bytes=shard_bytes(config.max_shard_gb),
        fuse=True,
        progress="quantize" if config.progress else None,
        observe=observe,
    )
    written = write_folder(job, config.out, config.overwrite)
    errors = {
        module: squares[module][0] / (squares[module][1] or 1.0) for module in formats if module in squares
    }
    return QuantizeReport(written=written, errors=errors)
