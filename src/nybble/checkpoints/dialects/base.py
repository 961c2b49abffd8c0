"""What a dialect is: names, types and conventions of quantised matrices on disk, to write and to find."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nybble import formats
from nybble.checkpoints.packed import Packed, reciprocal
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import Bank
from nybble.checkpoints.writer import Spec
from nybble.errors import CheckpointError
from nybble.formats.fp32 import divide

Pieces = Iterator[tuple[str, Tensor, int]]
"""(tensor name, data, first row) triples for `Writer.put`."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A quantised matrix [N, K], or a stack [E, N, K], found in a folder. Names may be of tensors that are
    missing.
    """

    module: str
    kind: str
    """"nvfp4", "mxfp4" or "mxfp8"; "fp8" for FP32 scales over square blocks."""
    codes: str
    scales: str
    outer: str | None = None
    """Name of the outer scale."""
    convention: str = "multiplier"
    """What the outer scale holds: "multiplier", "divisor" or "amax"."""
    denominator: str | None = None
    """With "amax": the name of what to divide it by."""
    input: str | None = None
    """Name of the scale of the activations, where the config calls for one."""
    rank: int = 2
    """Axes of the codes on disk: 2, 3 for a stack, 4 for a stack that keeps the bytes of a block on an axis
    of their own.
    """
    expected: dict[str, str] = field(default_factory=dict)
    """safetensors type of each tensor by name."""

    @property
    def tensors(self) -> tuple[str, ...]:
        names = (self.codes, self.scales, self.outer, self.denominator, self.input)
        return tuple(name for name in names if name is not None)

    def shape(self, folder: Folder) -> tuple[int, ...]:
        """Logical shape [..., N, K]. Raises CheckpointError when the codes have another number of axes."""
        shape = folder.entry(self.codes).shape
        if len(shape) != self.rank:
            raise CheckpointError(
                f"{folder.path}: {self.codes!r} is {list(shape)}; codes have {self.rank} axes here"
            )
        *lead, last = shape if self.rank < 4 else (*shape[:2], shape[2] * shape[3])
        return (*lead, last * 2 if self.kind in ("nvfp4", "mxfp4") else last)

    def load(self, folder: Folder, expert: int | None = None) -> Packed:
        """The matrix, or of a stack the matrix of one expert.

        Raises:
            CheckpointError: a tensor is missing, or its type or shape does not fit its codes.
        """
        for name in self.tensors:
            entry = folder.entry(name)
            if entry.dtype != self.expected.get(name, entry.dtype):
                raise CheckpointError(f"{folder.path}: {name!r} is {entry.dtype}, not {self.expected[name]}")
        *_, rows, cols = shape = self.shape(folder)
        block = formats.get(self.kind).block_cols
        assert block is not None
        if folder.entry(self.scales).shape[-2:] != (rows, -(-cols // block)):
            raise CheckpointError(
                f"{folder.path}: {self.scales!r} is {list(folder.entry(self.scales).shape)}; "
                f"codes of {list(shape)} need one scale a row and {block} columns"
            )
        at = None if expert is None else slice(expert, expert + 1)
        codes = folder.read(self.codes, at).view(torch.uint8)
        scales = folder.read(self.scales, at).view(torch.uint8)
        if expert is not None:
            codes, scales = codes[0], scales[0]
        multiplier, divisor = self._outer(folder, expert)
        return Packed(
            kind=self.kind,
            codes=codes.reshape(*codes.shape[: scales.dim() - 1], -1),
            scales=scales,
            multiplier=multiplier,
            divisor=divisor,
        )

    def _outer(self, folder: Folder, expert: int | None) -> tuple[Tensor | None, Tensor | None]:
        if self.outer is None:
            return None, None
        scale = folder.read(self.outer).flatten()
        if self.denominator is not None:
            scale = divide(scale, folder.read(self.denominator).flatten().expand_as(scale).contiguous())
        if expert is None and scale.numel() > 1:
            pass
        elif scale.numel() == 1:
            scale = scale.reshape(())
        elif expert is not None and expert < scale.numel():
            scale = scale[expert]
        else:
            raise CheckpointError(f"{folder.path}: {self.outer!r} holds {scale.numel()} scales")
        if self.convention == "divisor":
            return divide(1.0, scale), scale
        return scale, reciprocal(scale)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A matrix that an export writes, for its configs."""

    module: str
    """As in the file: model.layers.0.mlp.experts.3.gate_proj, or model.layers.0.mlp.experts for a stack."""
    kind: str


class Reader(ABC):
    """A family of files that can be read."""

    name: str

    @abstractmethod
    def find(self, folder: Folder) -> list[Stored]:
        """Every quantised matrix of a folder."""


@dataclass(frozen=True)
class Dialect(Reader):
    """A family of files that can be written too."""

    activations: bool = False
    """Whether the files tell the server to quantise activations (W4A4)."""

    kinds: ClassVar[tuple[str, ...]]
    """Kinds of quantised matrices that it can hold; all hold BF16 too."""

    @abstractmethod
    def matrix_specs(self, module: str, rows: int, cols: int, kind: str) -> list[Spec]:
        """The tensors of one quantised matrix [rows, cols]."""

    @abstractmethod
    def matrix_tensors(self, module: str, packed: Packed) -> Pieces:
        """Their data."""

    @abstractmethod
    def configs(
        self, config: dict[str, Any], written: list[Written], plain: list[str]
    ) -> dict[str, dict[str, Any]]:
        """JSON files by name: config.json and what else readers want. `plain` are modules of 2-D weights kept
        in BF16.
        """

    def bank_modules(self, bank: Bank) -> list[str]:
        """Modules of a bank as the dialect's configs name them."""
        return [
            f"{bank.module}.{e}.{part}"
            for e in range(bank.experts)
            for part in (*bank.inputs, bank.names[-1])
        ]

    def bank_specs(self, bank: Bank, kind: str) -> list[Spec]:
        """The tensors of a layer's experts: one 2-D matrix each, never-routed experts included."""
        specs = []
        for expert in range(bank.experts):
            for part in (*bank.inputs, bank.names[-1]):
                module = f"{bank.module}.{expert}.{part}"
                shape = (bank.hidden, bank.width) if part == bank.names[-1] else (bank.width, bank.hidden)
                if kind == "bf16":
                    specs.append(Spec(f"{module}.weight", "BF16", shape))
                else:
                    specs += self.matrix_specs(module, *shape, kind)
        return specs

    def bank_tensors(self, bank: Bank, start: int, first: Packed | Tensor, down: Packed | Tensor) -> Pieces:
        """Data of consecutive experts from `start` on: [n, 2I or I, H] (gate rows first) and [n, H, I]."""
        count = (first.codes if isinstance(first, Packed) else first).shape[0]
        for i in range(count):
            parts: list[tuple[str, Packed | Tensor]] = []
            for j, part in enumerate(bank.inputs):
                rows = slice(j * bank.width, (j + 1) * bank.width)
                matrix = first[i]
                parts.append((part, matrix.rows(rows) if isinstance(matrix, Packed) else matrix[rows]))
            parts.append((bank.names[-1], down[i]))
            for part, matrix in parts:
                module = f"{bank.module}.{start + i}.{part}"
                if isinstance(matrix, Packed):
                    yield from self.matrix_tensors(module, matrix)
                else:
                    yield f"{module}.weight", matrix, 0


def scale_specs(module: str, rows: int, cols: int, kind: str, suffix: str = "weight_scale") -> Spec:
    """The block scales of a matrix: E4M3 over 16 columns for NVFP4, bytes of E8M0 over 32 else."""
    block = formats.get(kind).block_cols
    assert block is not None
    return Spec(f"{module}.{suffix}", "F8_E4M3" if kind == "nvfp4" else "U8", (rows, cols // block))


def scale_bytes(packed: Packed) -> Tensor:
    """Block scales in the type that `scale_specs` declares."""
    return packed.scales.view(torch.float8_e4m3fn) if packed.kind == "nvfp4" else packed.scales
