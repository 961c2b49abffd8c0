"""`nybble validate`: what is wrong with a four-bit checkpoint, tensor by tensor, before a server answers
nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from nybble.checkpoints import checks
from nybble.checkpoints.checks import Problem
from nybble.checkpoints.dialects import Stored, detect
from nybble.checkpoints.dialects.inkling2 import interleave
from nybble.checkpoints.export import model_folder
from nybble.checkpoints.header import read_json
from nybble.checkpoints.packed import STORED, Packed, encode
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import Bank, Unit, find_units
from nybble.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """What to check."""

    checkpoint: tyro.conf.Positional[Path]
    """A folder in any dialect."""
    tp: int = 1
    """Ranks of tensor parallelism that will serve it."""
    against: Path | None = None
    """The checkpoint it was exported from: weights are then compared bit by bit, which also shows swapped
    nibbles.
    """
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise CheckpointError(f"tp is {self.tp}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found. `status` is the exit status: 0 for a sound folder, 1 else."""

    path: Path
    dialect: str
    matrices: int
    problems: list[Problem]
    compared: bool

    @property
    def status(self) -> int:
        return 1 if self.problems else 0

    def text(self) -> str:
        """One line a problem, and what was checked."""
        lines = [": ".join(filter(None, problem)) for problem in self.problems]
        against = (
            "weights and nibble order compared"
            if self.compared
            else "nibble order not checked: pass --against"
        )
        count = len(self.problems)
        verdict = f"{count} problem{'s' * (count > 1)}" if count else "sound"
        lines.append(f"{self.path}: {self.dialect}, {self.matrices} quantised matrices, {against}: {verdict}")
        return "\n".join(lines)


def validate(config: ValidateConfig) -> Report:
    """Run every check and collect the problems.

    Raises:
        CheckpointError: no such folder, no tensors in it, or its JSON files cannot be read at all.
    """
    folder = Folder.scan(config.checkpoint)
    problems: list[Problem] = [(check, "", sentence) for check, sentence in folder.problems]
    dialect = detect(folder)
    if dialect is None:
        if not folder.problems:
            problems.append(("config", "", f"{folder.path}: nothing in it is quantised"))
        return _report(folder, "high precision", [], problems, compared=False)
    hf_quant = {}
    if (folder.path / "hf_quant_config.json").exists():
        hf_quant = read_json(folder.path / "hf_quant_config.json")
    stored = []
    for item in dialect.find(folder):
        try:
            item.shape(folder)
            stored.append(item)
        except CheckpointError as error:
            problems.append(("shape", item.codes, str(error)))
    bar = tqdm(
        total=sum(folder.entry(item.codes).nbytes for item in stored),
        unit="B",
        unit_scale=True,
        desc="validate",
        disable=None if config.progress else True,  # None: not into pipes
    )
    with bar:
        problems += checks.guard(checks.structure(folder, stored))
        problems += checks.guard(checks.values(folder, stored, lambda nbytes: bar.update(nbytes) and None))
        problems += checks.guard(checks.fused_scales(folder, stored))
        problems += checks.guard(checks.tensor_parallel(folder, stored, config.tp))
        problems += checks.guard(checks.declared(folder, stored, dialect, hf_quant))
        if config.against is not None:
            problems += checks.guard(_compare(folder, stored, config.against))
    return _report(folder, dialect.name, stored, problems, compared=config.against is not None)


def _report(
    folder: Folder, dialect: str, stored: list[Stored], problems: list[Problem], compared: bool
) -> Report:
    unique = list(dict.fromkeys(problems))
    return Report(path=folder.path, dialect=dialect, matrices=len(stored), problems=unique, compared=compared)


def _compare(folder: Folder, stored: list[Stored], against: Path) -> Iterator[Problem]:
    source = Folder.open(model_folder(against))
    by_module = {item.module: item for item in stored}
    missing = dict.fromkeys(by_module)
    for unit in find_units(source):
        for module, weight, whole in _matrices(unit, source, by_module):
            name = module.partition("#")[0]
            missing.pop(name, None)
            yield from _same(folder, by_module[name], module, weight, whole)
    for module in missing:
        yield "weights", module, f"has no counterpart in {against}"


def _matrices(
    unit: Unit, source: Folder, by_module: dict[str, Stored]
) -> Iterator[tuple[str, slice | None, Tensor]]:
    """(module, rows of the whole, the weight that is quantised as one) for what is in `by_module`."""
    if not isinstance(unit, Bank):
        if unit.module in by_module:
            yield unit.module, None, source.read(unit.tensors[0])
        return
    for expert in range(unit.experts):
        parts = {f"{unit.module}.{expert}.{part}" for part in (*unit.inputs, unit.names[-1])}
        if not (parts | {f"{unit.module}.w13"}) & set(by_module):
            continue
        first, down = unit.read(source, range(expert, expert + 1))
        for j, part in enumerate(unit.inputs):
            if (module := f"{unit.module}.{expert}.{part}") in by_module:
                yield module, slice(j * unit.width, (j + 1) * unit.width), first[0]
        if (module := f"{unit.module}.{expert}.{unit.names[-1]}") in by_module:
            yield module, None, down[0]
        if f"{unit.module}.w13" in by_module:
            yield f"{unit.module}.w13#{expert}", None, interleave(first[0])
        if f"{unit.module}.w2" in by_module:
            yield f"{unit.module}.w2#{expert}", None, down[0]


def _same(folder: Folder, item: Stored, module: str, rows: slice | None, weight: Tensor) -> Iterator[Problem]:
    expert = int(module.partition("#")[2]) if "#" in module else None
    try:
        found = item.load(folder, expert)
    except CheckpointError:
        return  # the structure check has named it
    candidates = []
    for format in (name for name, kind in STORED.items() if kind == item.kind):
        packed = encode(weight, format)
        candidates.append(packed if rows is None else packed.rows(rows))
        if candidates[-1].codes.shape != found.codes.shape:
            sizes = " x ".join(map(str, weight.shape))
            yield "weights", module.replace("#", "."), f"has another size than the source's {sizes}"
            return
        if _equal(found, candidates[-1]):
            return
    swapped = Packed(
        kind=found.kind,
        codes=(found.codes << 4) | (found.codes >> 4),
        scales=found.scales,
        multiplier=found.multiplier,
        divisor=found.divisor,
    )
    if item.kind != "mxfp8" and any(torch.equal(swapped.codes, c.codes) for c in candidates):
        yield (
            "nibble-order",
            item.codes,
            "equals the source with the nibbles of each byte swapped; element 2i is the low one",
        )
        return
    best = min(candidates, key=lambda c: int((c.codes != found.codes).sum()))
    wrong = int((best.codes != found.codes).sum())
    what = f"{wrong} of {found.codes.numel()} bytes of codes" if wrong else "scales only"
    yield "weights", module.replace("#", "."), f"differs from the quantised source in {what}"


def _equal(a: Packed, b: Packed) -> bool:
    if not torch.equal(a.codes, b.codes) or not torch.equal(a.scales, b.scales):
        return False
    return a.multiplier is None or (b.multiplier is not None and torch.equal(a.multiplier, b.multiplier))
