"""The weights of a Hugging Face folder in high precision, seen as plain tensors, linears and banks of
experts.

Three layouts of experts occur and are read alike, gate rows above up rows:

    fused        P.gate_up_proj [E, 2I, H], P.down_proj [E, H, I]         transformers' parameters
    interleaved  P.w13_weight [E, 2I, H] gate and up rows in turn, P.w2_weight [E, H, I]      Inkling's files
    separate     P.0.gate_proj.weight [I, H], P.0.up_proj.weight, P.0.down_proj.weight [H, I]  most hub files

Without a gate there is `up_proj` alone. T, E, H, I as in the plan of the house: tokens, experts, hidden,
expert width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.checkpoints.header import DTYPES
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.scratch import Scratch
from nybble.errors import CheckpointError

FLOATS = ("F32", "BF16", "F16")
_SEPARATE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|w13_weight)")
_LAYER = re.compile(r"\.(?:layers|blocks|h)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A 2-D weight of the folder, [rows, cols]."""

    module: str
    rows: int
    cols: int

    @property
    def tensors(self) -> tuple[str, ...]:
        return (f"{self.module}.weight",)


@dataclass(frozen=True, kw_only=True)
class Bank:
    """The routed experts of one layer."""

    module: str
    """As in the file, such as model.layers.3.mlp.experts."""
    layout: str
    """"fused", "interleaved" or "separate"."""
    experts: int
    hidden: int
    width: int
    gated: bool
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """The file's names of gate, up and down in the separate layout."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the projections into the expert: gate and up, or up alone."""
        return self.names[:-1] if self.gated else self.names[1:-1]

    @property
    def rows(self) -> int:
        """Rows of the projections into the expert together: 2I, or I without a gate."""
        return self.width * len(self.inputs)

    @property
    def tensors(self) -> tuple[str, ...]:
        if self.layout == "separate":
            parts = (*self.inputs, self.names[-1])
            return tuple(f"{self.module}.{e}.{part}.weight" for e in range(self.experts) for part in parts)
        return self._first, self._down

    @property
    def _first(self) -> str:
        if self.layout == "interleaved":
            return f"{self.module}.w13_weight"
        return f"{self.module}.{'gate_up_proj' if self.gated else 'up_proj'}"

    @property
    def _down(self) -> str:
        if self.layout == "separate":
            return f"{self.module}.0.{self.names[-1]}.weight"
        return f"{self.module}.{'w2_weight' if self.layout == 'interleaved' else 'down_proj'}"

    def read(self, folder: Folder, experts: range, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """Projections into [n, 2I or I, H] (gate rows first) and out of [n, H, I] some consecutive experts.

        In the type of the folder, or with `scratch` in FP32 and in buffers of it.
        """
        into = (len(experts), self.rows, self.hidden)
        out = (len(experts), self.hidden, self.width)
        if scratch is None:
            dtype = DTYPES[folder.entry(self._down).dtype]
            first, down = torch.empty(into, dtype=dtype), torch.empty(out, dtype=dtype)
        else:
            first = scratch.empty("first", into, torch.float32)
            down = scratch.empty("down", out, torch.float32)

        def fill(name: str, rows: slice, to: Tensor) -> None:
            if scratch is None:
                folder.read(name, rows, out=to)
            else:
                folder.read_float32(name, rows, to)

        every = slice(None)
        if self.layout == "separate":
            for i, expert in enumerate(experts):
                for part, rows in zip(self.inputs, first[i].chunk(len(self.inputs)), strict=True):
                    fill(f"{self.module}.{expert}.{part}.weight", every, rows)
                fill(f"{self.module}.{expert}.{self.names[-1]}.weight", every, down[i])
            return first, down
        these = slice(experts.start, experts.stop)
        fill(self._down, these, down)
        if self.layout == "fused":
            fill(self._first, these, first)
            return first, down
        mixed = torch.empty_like(first) if scratch is None else scratch.empty("mixed", into, torch.float32)
        fill(self._first, these, mixed)
        first[:, : self.width], first[:, self.width :] = mixed[:, 0::2], mixed[:, 1::2]
        return first, down


Unit = Linear | Bank


def canonical(module: str) -> str:
    """The module's name in transformers' class, which recipes speak of, from its name in the file."""
    if module.startswith("backbone."):  # Nemotron-H
        return "model." + module.removeprefix("backbone.")
    return module.replace("model.llm.", "model.", 1)


def layer_of(module: str) -> int | None:
    """The index of the decoder layer that a module belongs to, or None."""
    match = _LAYER.search(f".{module}.")
    return int(match[1]) if match else None


def count_layers(modules: list[str]) -> int:
    """Decoder layers of the stack that these modules belong to."""
    return max((layer + 1 for module in modules if (layer := layer_of(module)) is not None), default=0)


def find_units(folder: Folder) -> list[Unit]:
    """All banks of experts and all 2-D `.weight` tensors, in the order of the folder.

    Raises:
        CheckpointError: experts with missing or unequal members, or in a layout that is none of the three.
    """
    units: list[Unit] = []
    seen: set[str] = set()
    separate: dict[str, dict[tuple[int, str], str]] = {}
    for name in folder:
        if match := _SEPARATE.fullmatch(name):
            separate.setdefault(match[1], {})[int(match[2]), match[3]] = name
    for name, entry in folder.tensors.items():
        if match := _SEPARATE.fullmatch(name):
            if match[1] not in seen:
                seen.add(match[1])
                units.append(_separate_bank(folder, match[1], separate[match[1]]))
        elif (match := _FUSED.fullmatch(name)) and len(entry.shape) == 3:
            units.append(_fused_bank(folder, match[1], match[2]))
        elif name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FLOATS:
            units.append(
                Linear(module=name.removesuffix(".weight"), rows=entry.shape[0], cols=entry.shape[1])
            )
    return units


def _separate_bank(folder: Folder, module: str, members: dict[tuple[int, str], str]) -> Bank:
    parts = {part for _, part in members}
    names = ("w1", "w3", "w2") if "w2" in parts else ("gate_proj", "up_proj", "down_proj")
    experts = 1 + max(expert for expert, _ in members)
    down = folder.entry(members.get((0, names[-1]), f"{module}.0.{names[-1]}.weight"))
    hidden, width = _two(folder, down.name)
    gated = names[0] in parts
    bank = Bank(
        module=module,
        layout="separate",
        experts=experts,
        hidden=hidden,
        width=width,
        gated=gated,
        names=names,
    )
    if len(members) != len(bank.tensors):
        lacking = next((name for name in bank.tensors if name not in folder), sorted(members.values())[0])
        raise CheckpointError(
            f"{folder.path}: {module} has {experts} experts, but {lacking!r} is missing or is odd"
        )
    for name in bank.tensors:
        want = (hidden, width) if name.endswith(f"{names[-1]}.weight") else (width, hidden)
        entry = folder.entry(name)
        if entry.shape != want or entry.dtype != down.dtype or entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{folder.path}: {name!r} is {entry.dtype} {list(entry.shape)}; its siblings want "
                f"{down.dtype} {list(want)}"
            )
    return bank


def _fused_bank(folder: Folder, module: str, first: str) -> Bank:
    layout = "interleaved" if first == "w13_weight" else "fused"
    gated = first != "up_proj"
    down = folder.entry(f"{module}.{'w2_weight' if layout == 'interleaved' else 'down_proj'}")
    into = folder.entry(f"{module}.{first}")
    ok = len(down.shape) == 3 and down.dtype == into.dtype and down.dtype in FLOATS
    if ok:
        experts, hidden, width = down.shape
        ok = into.shape == (experts, width * (2 if gated else 1), hidden)
    if not ok or f"{module}.{first}_bias" in folder:
        raise CheckpointError(
            f"{folder.path}: {into.name!r} {into.dtype} {list(into.shape)} and {down.name!r} {down.dtype} "
            f"{list(down.shape)} are not experts that can be quantised along their input"
        )
    return Bank(module=module, layout=layout, experts=experts, hidden=hidden, width=width, gated=gated)


def _two(folder: Folder, name: str) -> tuple[int, int]:
    shape = folder.entry(name).shape
    if len(shape) != 2:
        raise CheckpointError(f"{folder.path}: {name!r} has {len(shape)} axes, an expert's matrix has 2")
    return shape[0], shape[1]
