"""`nybble import`: a checkpoint in any dialect to a transformers folder in high precision, ready to train.

Weights become code * scale * multiplier in FP32, one rounding from exact. The codes are kept beside them (see
`sidecar.py`), so that exporting the model again gives back the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from nybble.checkpoints import sidecar
from nybble.checkpoints.dialects import Stored, detect
from nybble.checkpoints.export import copy_files
from nybble.checkpoints.header import NAMES, section
from nybble.checkpoints.load_experts import Experts, Task, finite, keep
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import Bank, find_units
from nybble.checkpoints.writer import Spec, Writer, shard_bytes, whole_model, write_json
from nybble.errors import CheckpointError
from nybble.formats import e4m3

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_STACK = re.compile(r"(.+\.experts)\.(w13|w2)")


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """What to import, and how."""

    checkpoint: tyro.conf.Positional[Path]
    """A folder in one of the dialects, or a BF16 or FP8-block transformers folder."""
    out: Path
    """The transformers folder to write. It appears when it is whole."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights that were quantised; BF16 rounds them once more."""
    keep_codes: bool = True
    """Keep four-bit codes beside the weights, so that an export gives them back unchanged."""
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""
    overwrite: bool = False
    """Replace `out` if it exists."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        shard_bytes(self.max_shard_gb)


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import found."""

    out: Path
    dialect: str
    matrices: dict[str, int]
    """Quantised matrices by kind."""

    def text(self) -> str:
        """One line a person reads."""
        what = ", ".join(f"{count} matrices in {kind}" for kind, count in self.matrices.items())
        return f"{self.out}: from {self.dialect}: {what or 'nothing was quantised'}"


def import_(config: ImportConfig) -> ImportReport:
    """Write the model in high precision.

    Raises:
        CheckpointError: a bad or incomplete folder, a tensor whose scale is missing, a weight that decodes to
            NaN.
    """
    folder = Folder.open(config.checkpoint)
    dialect = detect(folder)
    stored = dialect.find(folder) if dialect else []
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    tasks, counts = _tasks(folder, stored, dtype)
    limit = shard_bytes(config.max_shard_gb)
    with whole_model(config.out, config.checkpoint, config.overwrite) as part:
        specs = [spec for task in tasks for spec in task.specs]
        kept = [spec for task in tasks for spec in task.kept] if config.keep_codes else []
        codes: Writer | None = None
        if kept:
            (part / sidecar.FOLDER).mkdir()
            codes = Writer(part / sidecar.FOLDER, kept, limit)
        bar = tqdm(
            total=sum(t.nbytes for t in tasks),
            unit="B",
            unit_scale=True,
            desc="import",
            disable=None if config.progress else True,  # None: not into pipes
        )
        try:
            with bar, Writer(part, specs, limit) as writer:
                for task in tasks:
                    task.run(writer, codes)
                    bar.update(task.nbytes)
                writer.close()
            if codes is not None:
                codes.close()
        finally:
            if codes is not None:
                codes.abandon()
        write_json(part / "config.json", _config(folder.config, config.dtype if stored else None))
        copy_files(folder.path, part)
    return ImportReport(
        out=config.out, dialect=dialect.name if dialect else "high precision", matrices=counts
    )


def _config(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    out = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    if dtype is not None:
        out["dtype"] = dtype
    return out


def _tasks(folder: Folder, stored: list[Stored], dtype: torch.dtype) -> tuple[list[Task], dict[str, int]]:
    stacked = str(folder.config.get("model_type", "")).startswith("inkling2")
    counts: dict[str, int] = {}
    banks: dict[str, Experts] = {}
    tasks: list[Task] = []
    for item in stored:
        shape = item.shape(folder)
        counts[item.kind] = counts.get(item.kind, 0) + (shape[0] if len(shape) == 3 else 1)
        if match := _EXPERT.fullmatch(item.module):
            banks.setdefault(match[1], Experts(match[1])).add(int(match[2]), match[3], item)
        elif match := _STACK.fullmatch(item.module):
            banks.setdefault(match[1], Experts(match[1])).add_stack(match[2], item, shape[0])
        elif item.codes.endswith("_blocks"):
            tasks.append(_gpt_oss(folder, item, dtype))
        else:
            tasks.append(_matrix(folder, item, dtype))
    used = {name for item in stored for name in item.tensors}
    plain = replace(folder, tensors={name: e for name, e in folder.tensors.items() if name not in used})
    for unit in find_units(plain):
        wanted = "interleaved" if stacked else "separate"
        if isinstance(unit, Bank) and unit.layout not in (wanted, "fused"):
            experts = Experts(unit.module, names=unit.names)
            for expert in range(unit.experts):
                experts.plain[expert] = unit
            banks[unit.module] = experts
            used.update(unit.tensors)
    tasks += [bank.task(folder, stacked, dtype) for bank in banks.values()]
    # scales of activations and of the cache mean nothing without the quantisation that they belong to
    scales = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale") if stored else ()
    tasks += [_copy(folder, name) for name in plain if name not in used and not name.endswith(scales or "\0")]
    return tasks, counts


def _matrix(folder: Folder, item: Stored, dtype: torch.dtype) -> Task:
    rows, cols = item.shape(folder)
    name = f"{item.module}.weight"
    coded = item.kind != "fp8"

    def run(writer: Writer, codes: Writer | None) -> None:
        if not coded:
            writer.put(name, finite(_fp8(folder, item), item.module).to(dtype))
            return
        packed = item.load(folder)
        writer.put(name, finite(packed.decode(), item.module).to(dtype))
        keep(codes, item.module, packed)

    return Task(
        specs=[Spec(name, NAMES[dtype], (rows, cols))],
        kept=sidecar.specs(item.module, rows, cols, item.kind) if coded else [],
        run=run,
        nbytes=folder.entry(item.codes).nbytes,
    )


def _gpt_oss(folder: Folder, item: Stored, dtype: torch.dtype) -> Task:
    experts, rows, cols = item.shape(folder)

    def run(writer: Writer, _: Writer | None) -> None:
        for expert in range(experts):
            values = finite(item.load(folder, expert).decode(), item.module)
            writer.put(item.module, values.T.to(dtype)[None].contiguous(), expert)

    spec = Spec(item.module, NAMES[dtype], (experts, cols, rows))
    return Task(specs=[spec], kept=[], run=run, nbytes=folder.entry(item.codes).nbytes)


def _copy(folder: Folder, name: str) -> Task:
    entry = folder.entry(name)
    return Task(
        specs=[Spec(name, entry.dtype, entry.shape)],
        kept=[],
        run=lambda writer, _: writer.put(name, folder.read(name)),
        nbytes=entry.nbytes,
    )


def _fp8(folder: Folder, item: Stored) -> Tensor:
    block = section(folder.config, "quantization_config").get("weight_block_size", [128, 128])
    values = e4m3.decode(folder.read(item.codes).view(torch.uint8))
    rows, cols = values.shape
    scales = folder.read(item.scales).float()
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
        or scales.shape != (-(-rows // block[0]), -(-cols // block[1]))
    ):
        raise CheckpointError(
            f"{folder.path}: {item.scales!r} {list(scales.shape)} does not fit {[rows, cols]} in blocks "
            f"of {block}"
        )
    scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return values * scales
