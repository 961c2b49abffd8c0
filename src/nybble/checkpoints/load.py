"""`nybble import`: a checkpoint in any dialect to a transformers folder in high precision, ready to train.

Weights become code * scale * multiplier in FP32, one rounding from exact. The codes are kept beside them (see
`sidecar.py`), so that exporting the model again gives back the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from nybble.checkpoints import sidecar
from nybble.checkpoints.dialects import Stored, detect
from nybble.checkpoints.dialects.inkling2 import deinterleave, interleave
from nybble.checkpoints.export import copy_files
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import NAMES, Folder, section
from nybble.checkpoints.source import FLOATS, Bank, find_units
from nybble.checkpoints.writer import Spec, Writer, whole_folder, write_json
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


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Tensors to write together, and where they come from."""

    specs: list[Spec]
    kept: list[Spec]
    run: Callable[[Writer, Writer | None], None]
    nbytes: int


def import_(config: ImportConfig) -> ImportReport:
    """Write the model in high precision.

    Raises:
        CheckpointError: a bad or incomplete folder, a tensor whose scale is missing, a weight that decodes to NaN.
    """
    folder = Folder.open(config.checkpoint)
    dialect = detect(folder)
    stored = dialect.find(folder) if dialect else []
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    tasks, counts = _tasks(folder, stored, dtype)
    limit = int(config.max_shard_gb * 1e9)
    with whole_folder(config.out, config.overwrite) as part:
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
            disable=not config.progress,
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


def _tasks(folder: Folder, stored: list[Stored], dtype: torch.dtype) -> tuple[list[_Task], dict[str, int]]:
    stacked = str(folder.config.get("model_type", "")).startswith("inkling2")
    counts: dict[str, int] = {}
    banks: dict[str, _Experts] = {}
    tasks: list[_Task] = []
    for item in stored:
        shape = item.shape(folder)
        counts[item.kind] = counts.get(item.kind, 0) + (shape[0] if len(shape) == 3 else 1)
        if match := _EXPERT.fullmatch(item.module):
            banks.setdefault(match[1], _Experts(match[1])).add(int(match[2]), match[3], item)
        elif match := _STACK.fullmatch(item.module):
            banks.setdefault(match[1], _Experts(match[1])).add_stack(match[2], item, shape[0])
        elif item.codes.endswith("_blocks"):
            tasks.append(_gpt_oss(folder, item, dtype))
        else:
            tasks.append(_matrix(folder, item, dtype))
    used = {name for item in stored for name in item.tensors}
    plain = replace(folder, tensors={name: e for name, e in folder.tensors.items() if name not in used})
    for unit in find_units(plain):
        wanted = "interleaved" if stacked else "separate"
        if isinstance(unit, Bank) and unit.layout not in (wanted, "fused"):
            experts = _Experts(unit.module, names=unit.names)
            for expert in range(unit.experts):
                experts.plain[expert] = unit
            banks[unit.module] = experts
            used.update(unit.tensors)
    tasks += [bank.task(folder, stacked, dtype) for bank in banks.values()]
    # scales of activations and of the cache mean nothing without the quantisation that they belong to
    scales = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale") if stored else ()
    tasks += [_copy(folder, name) for name in plain if name not in used and not name.endswith(scales or "\0")]
    return tasks, counts


def _matrix(folder: Folder, item: Stored, dtype: torch.dtype) -> _Task:
    rows, cols = item.shape(folder)
    name = f"{item.module}.weight"
    keep = item.kind != "fp8"

    def run(writer: Writer, codes: Writer | None) -> None:
        if not keep:
            writer.put(name, _finite(_fp8(folder, item), item.module).to(dtype))
            return
        packed = item.load(folder)
        writer.put(name, _finite(packed.decode(), item.module).to(dtype))
        _keep(codes, item.module, packed)

    return _Task(
        specs=[Spec(name, NAMES[dtype], (rows, cols))],
        kept=sidecar.specs(item.module, rows, cols, item.kind) if keep else [],
        run=run,
        nbytes=folder.entry(item.codes).nbytes,
    )


def _gpt_oss(folder: Folder, item: Stored, dtype: torch.dtype) -> _Task:
    experts, rows, cols = item.shape(folder)

    def run(writer: Writer, codes: Writer | None) -> None:
        for expert in range(experts):
            values = _finite(item.load(folder, expert).decode(), item.module)
            writer.put(item.module, values.T.to(dtype)[None].contiguous(), expert)

    spec = Spec(item.module, NAMES[dtype], (experts, cols, rows))
    return _Task(specs=[spec], kept=[], run=run, nbytes=folder.entry(item.codes).nbytes)


def _copy(folder: Folder, name: str) -> _Task:
    entry = folder.entry(name)
    return _Task(
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
            f"{folder.path}: {item.scales!r} {list(scales.shape)} does not fit {[rows, cols]} in blocks of {block}"
        )
    scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return values * scales


def _finite(values: Tensor, module: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{module}: decodes to NaN or infinity; `nybble validate` names the scale")
    return values


def _keep(codes: Writer | None, module: str, packed: Packed) -> None:
    if codes is not None:
        for name, tensor in sidecar.tensors(module, packed):
            codes.put(name, tensor)


class _Experts:
    """The experts of one layer, from single matrices or from stacks, quantised or not."""

    def __init__(self, module: str, names: tuple[str, ...] = ()) -> None:
        self.module = module
        self.single: dict[tuple[int, str], Stored] = {}
        self.stacks: dict[str, Stored] = {}
        self.plain: dict[int, Bank] = {}
        self.names = names
        self.count = 0

    def add(self, expert: int, part: str, item: Stored) -> None:
        self.single[expert, part] = item
        self.count = max(self.count, expert + 1)
        self.names = (
            ("w1", "w3", "w2") if part in ("w1", "w2", "w3") else ("gate_proj", "up_proj", "down_proj")
        )

    def add_stack(self, leaf: str, item: Stored, count: int) -> None:
        self.stacks[leaf] = item
        self.count = count
        self.names = ("gate_proj", "up_proj", "down_proj")

    @property
    def parts(self) -> tuple[str, ...]:
        gated = not self.single or any(part == self.names[0] for _, part in self.single)
        return self.names if gated else self.names[1:]

    def load(self, folder: Folder, expert: int) -> dict[str, Packed | Tensor]:
        """The parts of one expert: [I, H] into it, [H, I] out of it."""
        if self.plain:
            bank = self.plain[expert]
            first, down = bank.read(folder, range(expert, expert + 1))
            return dict(zip(self.names, (*first[0].chunk(len(bank.inputs)), down[0]), strict=True))
        if not self.stacks:
            missing = [p for p in self.parts if (expert, p) not in self.single]
            if missing:
                raise CheckpointError(f"{folder.path}: {self.module}.{expert}.{missing[0]} is missing")
            return {part: self.single[expert, part].load(folder) for part in self.parts}
        if len(self.stacks) != 2:
            raise CheckpointError(f"{folder.path}: {self.module} needs w13_weight and w2_weight")
        w13 = self.stacks["w13"].load(folder, expert)
        rows = replace(w13, codes=deinterleave(w13.codes), scales=deinterleave(w13.scales))
        half = rows.shape[0] // 2
        gate, up = rows.rows(slice(0, half)), rows.rows(slice(half, None))
        return dict(zip(self.names, (gate, up, self.stacks["w2"].load(folder, expert)), strict=True))

    def task(self, folder: Folder, stacked: bool, dtype: torch.dtype) -> _Task:
        count = len(self.plain) or self.count
        hidden, width = self._sizes(folder)
        shapes = dict.fromkeys(self.parts[:-1], (width, hidden)) | {self.parts[-1]: (hidden, width)}
        out_dtype = NAMES[dtype]
        if self.plain:
            out_dtype = folder.entry(self.plain[0].tensors[0]).dtype
            assert out_dtype in FLOATS
        if stacked:
            rows = width * (len(self.parts) - 1)
            specs = [
                Spec(f"{self.module}.w13_weight", out_dtype, (count, rows, hidden)),
                Spec(f"{self.module}.w2_weight", out_dtype, (count, hidden, width)),
            ]
        else:
            names = [(f"{self.module}.{e}.{part}.weight", part) for e in range(count) for part in self.parts]
            specs = [Spec(name, out_dtype, shapes[part]) for name, part in names]
        kept = []
        if not self.plain:
            kinds = {part: self._kind(part) for part in self.parts}
            for e in range(count):
                for part in self.parts:
                    kept += sidecar.specs(f"{self.module}.{e}.{part}", *shapes[part], kinds[part])

        def run(writer: Writer, codes: Writer | None) -> None:
            for e in range(count):
                values = []
                for part, matrix in self.load(folder, e).items():
                    module = f"{self.module}.{e}.{part}"
                    if isinstance(matrix, Packed):
                        _keep(codes, module, matrix)
                        matrix = _finite(matrix.decode(), module).to(dtype)
                    values.append(matrix)
                    if not stacked:
                        writer.put(f"{module}.weight", matrix)
                if stacked:
                    first = torch.cat(values[:-1])
                    writer.put(f"{self.module}.w13_weight", interleave(first)[None], e)
                    writer.put(f"{self.module}.w2_weight", values[-1][None], e)

        items = list(self.single.values()) + list(self.stacks.values())
        nbytes = sum(folder.entry(item.codes).nbytes for item in items)
        return _Task(specs=specs, kept=kept, run=run, nbytes=nbytes)

    def _kind(self, part: str) -> str:
        if self.stacks:
            return next(iter(self.stacks.values())).kind
        return next(item.kind for (_, name), item in self.single.items() if name == part)

    def _sizes(self, folder: Folder) -> tuple[int, int]:
        if self.plain:
            return self.plain[0].hidden, self.plain[0].width
        down = self.stacks.get("w2") or next(
            (item for (_, part), item in self.single.items() if part == self.names[-1]), None
        )
        if down is None:
            raise CheckpointError(f"{folder.path}: {self.module} has no {self.names[-1]}")
        *_, hidden, width = down.shape(folder)
        return hidden, width
