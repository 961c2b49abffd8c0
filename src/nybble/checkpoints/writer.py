"""Writing sharded safetensors in one pass.

The names, types and shapes of an export are known before its data, so headers are written first and every
piece goes straight to its place: memory holds the piece in hand, whatever the size of a shard. A folder
appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from nybble.checkpoints.header import DTYPES, NAMES
from nybble.checkpoints.safetensors_io import INDEX_NAME
from nybble.checkpoints.vectored import raw, runs, transfer
from nybble.errors import CheckpointError
from nybble.folders import whole_folder


@dataclass(frozen=True)
class Spec:
    """A tensor to come."""

    name: str
    dtype: str
    """safetensors' name of the type."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * prod(self.shape)


def shard_bytes(gb: float) -> int:
    """`gb` 10^9 bytes, the size of the largest file; CheckpointError unless it can hold something."""
    if not 0 < gb < math.inf:
        raise CheckpointError(f"max_shard_gb is {gb}; it must be above 0, and finite")
    return int(gb * 1e9)


@contextmanager
def whole_model(out: Path | str, source: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends, and vanishes when it raises; `source` is what it is
    made from.

    Raises:
        CheckpointError: `out` exists and `overwrite` is false, `out` is no folder with a model or holds the
            source, or the disk refuses (full, read-only).
    """
    out = Path(out)
    if out.exists():
        if not overwrite:
            raise CheckpointError(f"{out}: exists; choose another name or pass --overwrite")
        _check_replaceable(out, source)
    with whole_folder(out, CheckpointError) as part:
        yield part


def _check_replaceable(out: Path, source: Path) -> None:
    """--overwrite replaces models: not the source, not a run, not what somebody keeps under that name."""
    if source.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out}: holds the source {source}; choose another name")
    model = out.is_dir() and (out / "config.json").is_file() and any(out.glob("*.safetensors"))
    empty = out.is_dir() and not any(out.iterdir())
    if not (model or empty) or (out / "checkpoints").exists():
        raise CheckpointError(
            f"{out}: is not a folder with a model, so it is not replaced; choose another name"
        )


class Writer:
    """Shards of `specs` under `folder`; fill them with `put`, end with `close`."""

    def __init__(self, folder: Path, specs: list[Spec], max_shard_bytes: int = 5_000_000_000) -> None:
        self.folder = folder
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            twice = sorted(spec.name for spec in specs if specs.count(spec) > 1)
            raise CheckpointError(f"{folder}: two tensors would have the name {twice[:1]}")
        self._missing = {spec.name: spec.nbytes for spec in specs}
        self._lock = threading.Lock()
        self._place: dict[str, tuple[int, int]] = {}
        shards = _shards(specs, max_shard_bytes)
        total = len(shards)
        self._names = [
            "model.safetensors" if total == 1 else f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            for i in range(total)
        ]
        self._files: list[int] = []
        for i, shard in enumerate(shards):
            self._files.append(os.open(folder / self._names[i], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            self._header(i, shard)

    def _header(self, index: int, shard: list[Spec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        # wide types first: every tensor then starts on a multiple of its own size, as readers that map files
        # want
        for spec in sorted(shard, key=lambda spec: -DTYPES[spec.dtype].itemsize):
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            self._place[spec.name] = (index, at)
            at += spec.nbytes
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 8)
        transfer(os.pwritev, self._files[index], [memoryview(len(data).to_bytes(8, "little") + data)], 0)
        base = 8 + len(data)
        for spec in shard:
            self._place[spec.name] = (index, base + self._place[spec.name][1])

    def put(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write `tensor` as the rows of `name` from `row` on (the whole of it when it has its shape)."""
        self.put_all([(name, tensor, row)])

    def put_all(self, pieces: Iterable[tuple[str, torch.Tensor, int]]) -> None:
        """As `put` for each piece, from any thread; neighbours in a file are written at once."""
        for index, at, views in runs([self._piece(*piece) for piece in pieces]):
            transfer(os.pwritev, self._files[index], views, at)

    def _piece(self, name: str, tensor: torch.Tensor, row: int) -> tuple[int, int, memoryview]:
        spec = self.specs[name]
        if NAMES.get(tensor.dtype) != spec.dtype or tuple(tensor.shape[1:]) != spec.shape[1:]:
            raise CheckpointError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} does not fit {spec.dtype} {list(spec.shape)}"
            )
        index, start = self._place[name]
        row_bytes = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        with self._lock:
            self._missing[name] -= tensor.nbytes
        if self._missing[name] < 0:
            raise CheckpointError(f"{name}: more data than its shape {list(spec.shape)} holds")
        return index, start + row * row_bytes, raw(tensor.detach().cpu().contiguous())

    def close(self) -> int:
        """Check that every byte came, write the index when there are several shards, and return the bytes
        written.
        """
        lacking = [name for name, nbytes in self._missing.items() if nbytes]
        if lacking:
            raise CheckpointError(f"{self.folder}: {lacking[0]} was never written")
        self.abandon()
        total = sum(spec.nbytes for spec in self.specs.values())
        if len(self._names) > 1:
            weight_map = {name: self._names[self._place[name][0]] for name in self.specs}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(self.folder / INDEX_NAME, index)
        return total

    def abandon(self) -> None:
        """Close the files as they are."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def _shards(specs: list[Spec], limit: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
