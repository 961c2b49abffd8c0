"""Codes that an import found, kept beside the high-precision weights so that an export can give them back
unchanged.

Rounding the decoded weights again is not enough: where a block scale is subnormal in E4M3, where another
program chose scales by another rule, or where an outer scale was calibrated with head room, a second rounding
gives other codes. So codes, scales and both outer numbers are stored in a subfolder, and an export uses them
for every matrix whose weights still decode from them to the bit. Weights that training moved are quantised
afresh.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nybble import formats
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import Bank, Unit
from nybble.checkpoints.writer import Spec
from nybble.errors import CheckpointError

FOLDER = "codes"
"""Name of the subfolder."""


def specs(module: str, rows: int, cols: int, kind: str) -> list[Spec]:
    """The tensors kept of one matrix [rows, cols]."""
    row = formats.get(kind)
    assert row.block_cols is not None
    out = [
        Spec(f"{module}.{kind}.codes", "U8", (rows, cols // 2 if row.packed else cols)),
        Spec(f"{module}.{kind}.scales", "U8", (rows, -(-cols // row.block_cols))),
    ]
    if row.two_level:
        out += [Spec(f"{module}.{kind}.multiplier", "F32", ()), Spec(f"{module}.{kind}.divisor", "F32", ())]
    return out


def tensors(module: str, packed: Packed) -> list[tuple[str, Tensor]]:
    """Their data."""
    out = [(f"{module}.{packed.kind}.codes", packed.codes), (f"{module}.{packed.kind}.scales", packed.scales)]
    if packed.multiplier is not None and packed.divisor is not None:
        out.append((f"{module}.{packed.kind}.multiplier", packed.multiplier.reshape(())))
        out.append((f"{module}.{packed.kind}.divisor", packed.divisor.reshape(())))
    return out


class Sidecar:
    """The kept codes of a folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.kinds: dict[str, str] = {}
        for name in folder:
            if name.endswith(".codes"):
                module, _, kind = name.removesuffix(".codes").rpartition(".")
                self.kinds[module] = kind

    @classmethod
    def of(cls, path: Path) -> Sidecar | None:
        """The sidecar of the model folder `path`, if it has one."""
        return cls(Folder.open(path / FOLDER)) if (path / FOLDER).is_dir() else None

    def formats(self, units: list[Unit]) -> dict[str, str]:
        """The kind of each unit that has codes here."""
        found = {}
        for unit in units:
            key = f"{unit.module}.0.{unit.names[-1]}" if isinstance(unit, Bank) else unit.module
            if key in self.kinds:
                found[unit.module] = self.kinds[key]
        return found

    def load(self, module: str, kind: str) -> Packed | None:
        """The codes of one matrix, if there are any of that kind."""
        if self.kinds.get(module) != kind:
            return None
        base = f"{module}.{kind}"
        two_level = formats.get(kind).two_level
        return Packed(
            kind=kind,
            codes=self.folder.read(f"{base}.codes"),
            scales=self.folder.read(f"{base}.scales"),
            multiplier=self.folder.read(f"{base}.multiplier") if two_level else None,
            divisor=self.folder.read(f"{base}.divisor") if two_level else None,
        )

    def expert(self, bank: Bank, expert: int, kind: str) -> tuple[Packed, Packed] | None:
        """Projections into (gate above up) and out of one expert; None unless all are here and share an outer
        scale.
        """
        parts = [self.load(f"{bank.module}.{expert}.{part}", kind) for part in (*bank.inputs, bank.names[-1])]
        if any(part is None for part in parts):
            return None
        *first, down = [part for part in parts if part is not None]
        if any(
            part.multiplier is not None and not _same(part.multiplier, first[0].multiplier) for part in first
        ):
            return None
        into = Packed(
            kind=kind,
            codes=torch.cat([part.codes for part in first]),
            scales=torch.cat([part.scales for part in first]),
            multiplier=first[0].multiplier,
            divisor=first[0].divisor,
        )
        return into, down


def reuse(kept: Packed | None, weight: Tensor, fresh: Packed, index: int | None = None) -> Packed:
    """`kept` where `weight` still decodes from it to the bit, else `fresh`."""
    if kept is None:
        return fresh
    target = weight if index is None else weight[index]
    if kept.shape != tuple(target.shape):
        raise CheckpointError(f"kept codes {list(kept.shape)} do not fit the weight {list(target.shape)}")
    same = _same(kept.decode(weight.dtype), target)
    return kept if same else (fresh if index is None else fresh[index])


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
