"""The experts of one layer on their way to high precision, from any layout to that of the model's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nybble.checkpoints import sidecar
from nybble.checkpoints.dialects import Stored
from nybble.checkpoints.dialects.inkling2 import deinterleave, interleave
from nybble.checkpoints.header import NAMES
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import FLOATS, Bank
from nybble.checkpoints.writer import Spec, Writer
from nybble.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Task:
    """Tensors to write together, and where they come from."""

    specs: list[Spec]
    kept: list[Spec]
    run: Callable[[Writer, Writer | None], None]
    nbytes: int


def finite(values: Tensor, module: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{module}: decodes to NaN or infinity; `nybble validate` names the scale")
    return values


def keep(codes: Writer | None, module: str, packed: Packed) -> None:
    if codes is not None:
        for name, tensor in sidecar.tensors(module, packed):
            codes.put(name, tensor)


class Experts:
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

    def task(self, folder: Folder, stacked: bool, dtype: torch.dtype) -> Task:
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
                        keep(codes, module, matrix)
                        matrix = finite(matrix.decode(), module).to(dtype)
                    values.append(matrix)
                    if not stacked:
                        writer.put(f"{module}.weight", matrix)
                if stacked:
                    first = torch.cat(values[:-1])
                    writer.put(f"{self.module}.w13_weight", interleave(first)[None], e)
                    writer.put(f"{self.module}.w2_weight", values[-1][None], e)

        items = list(self.single.values()) + list(self.stacks.values())
        nbytes = sum(folder.entry(item.codes).nbytes for item in items)
        return Task(specs=specs, kept=kept, run=run, nbytes=nbytes)

    def _kind(self, part: str) -> str:
        if self.stacks:
            return next(iter(self.stacks.values())).kind
        kind = next((item.kind for (_, name), item in self.single.items() if name == part), None)
        if kind is None:
            raise CheckpointError(f"{self.module} has no {part} in any expert; the checkpoint is not whole")
        return kind

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
