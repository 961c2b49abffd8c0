"""Reading folders of safetensors files.

Tensors are read with plain positioned reads: no memory map that a truncated file could turn into a bus error,
and a resident size of the tensors in hand. The `safetensors` library writes and reads the same files; the
tests hold both together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from nybble.checkpoints.header import DTYPES, Entry, absent, check_folder, read_header, read_json
from nybble.checkpoints.vectored import raw, runs, transfer
from nybble.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
PIECE_BYTES = 1 << 20
"""What is read at once where it is widened: it fits the second-level cache of a core with what it becomes."""


@dataclass
class Folder:
    """A folder of safetensors files, as `save_pretrained` writes them.

    `problems` collects what `scan` found wrong between the index and the files; `open` raises the first of
    them.
    """

    path: Path
    config: dict[str, Any]
    """config.json, or empty."""
    tensors: dict[str, Entry]
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(check, sentence) pairs."""

    @classmethod
    def open(cls, path: Path | str) -> Folder:
        """Open a folder that must be sound.

        Raises:
            CheckpointError: as `scan`, or the first problem of the index or of a header.
        """
        folder = cls.scan(path)
        if folder.problems:
            raise CheckpointError(folder.problems[0][1])
        return folder

    @classmethod
    def scan(cls, path: Path | str) -> Folder:
        """Open a folder and collect its problems, so that a validator can report all of them.

        Raises:
            CheckpointError: no such folder, or no tensors in it and nothing that says why.
        """
        path = Path(path)
        check_folder(path)
        config_path = path / "config.json"
        config = read_json(config_path) if os.path.lexists(config_path) else {}
        folder = cls(path=path, config=config, tensors={})
        index = folder._index()
        files = sorted(set(index.values())) if index else sorted(p.name for p in path.glob("*.safetensors"))
        for name in files:
            if why := absent(path / name):
                named = "the index names this file, and it " if index else ""
                folder._problem("index-file" if index else "file", f"{path / name}: {named}{why}")
                continue
            try:
                header = read_header(path / name)
            except CheckpointError as error:
                folder._problem("header", str(error))
                continue
            for tensor, entry in header.items():
                if tensor in folder.tensors:
                    other = folder.tensors[tensor].file.name
                    folder._problem("duplicate", f"{path}: {tensor!r} is in {other} and in {name}")
                elif index and index.get(tensor) != name:
                    folder._problem(
                        "index-entry", f"{path / name}: holds {tensor!r}, which the index does not say"
                    )
                folder.tensors.setdefault(tensor, entry)
        for tensor in index:
            if tensor not in folder.tensors:
                folder._problem(
                    "index-entry",
                    f"{path}: the index lists {tensor!r}, and no file holds it; save the model again",
                )
        if not folder.tensors and not folder.problems:
            raise CheckpointError(f"{path}: no tensors in it; name a folder with model.safetensors")
        return folder

    def _problem(self, check: str, sentence: str) -> None:
        self.problems.append((check, sentence))

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX_NAME
        if not os.path.lexists(path):
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path}: has no weight_map object")
        for tensor, name in weight_map.items():
            # a bare file name of this folder: the index must not reach for files elsewhere
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}: {tensor!r} points to {name!r}, not to a safetensors file beside it"
                )
            if "\0" in name or "\\" in name:
                raise CheckpointError(f"{path}: {tensor!r} points to {name!r}, which is no file name")
        return weight_map

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def entry(self, name: str) -> Entry:
        """Raises CheckpointError when the tensor is not there."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: the tensor {name!r} is missing")
        return self.tensors[name]

    def read(self, name: str, rows: slice | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor `name`, or only `rows` (a contiguous range) along its first axis.

        `out`, when given, is a contiguous tensor of the same type and number of bytes that receives the data.
        """
        entry = self.entry(name)
        start, shape = entry.start, entry.shape
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            start += first * (entry.nbytes // shape[0] if shape[0] else 0)
            shape = (max(last - first, 0), *shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=DTYPES[entry.dtype])
        self._check(entry, out, prod(shape))
        self._transfer([(entry.file, start, raw(out))])
        return out

    def read_float32(self, name: str, rows: slice, out: torch.Tensor) -> None:
        """Fill the contiguous FP32 tensor `out` from `rows` of a tensor of any floating type.

        Goes piece by piece, so that what was read is widened while it is in the cache of its core.
        """
        entry = self.entry(name)
        first, last, _ = rows.indices(entry.shape[0])
        row_bytes = entry.nbytes // max(entry.shape[0], 1)
        values = out.flatten()
        dtype = DTYPES[entry.dtype]
        if values.numel() * dtype.itemsize != (last - first) * row_bytes or out.dtype != torch.float32:
            raise CheckpointError(f"{self.path}: {name!r} is {list(entry.shape)}, not what was asked for")
        if dtype == torch.float32:
            self._transfer([(entry.file, entry.start + first * row_bytes, raw(out))])
            return
        piece = torch.empty(PIECE_BYTES // dtype.itemsize, dtype=dtype)
        at = entry.start + first * row_bytes
        for part in values.split(piece.numel()):
            narrow = piece[: part.numel()]
            self._transfer([(entry.file, at, raw(narrow))])
            part.copy_(narrow)
            at += narrow.nbytes

    def _check(self, entry: Entry, out: torch.Tensor, count: int) -> None:
        if out.numel() != count or out.dtype != DTYPES[entry.dtype] or not out.is_contiguous():
            raise CheckpointError(
                f"{self.path}: {entry.name!r} is {entry.dtype} {list(entry.shape)}, not what was asked for"
            )

    def _transfer(self, pieces: list[tuple[Path, int, memoryview]]) -> None:
        for path, start, views in runs(pieces):
            try:
                with open(path, "rb", buffering=0) as file:
                    whole = transfer(os.preadv, file.fileno(), views, start)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
            if not whole:
                raise CheckpointError(f"{path}: ends early; it was truncated while it was being read")
