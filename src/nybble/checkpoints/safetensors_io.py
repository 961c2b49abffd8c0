"""Reading safetensors folders that nobody vouches for.

Everything a header claims is checked against the size of its file before a byte is allocated for it, and tensors are
read with plain positioned reads: no memory map that a truncated file could turn into a bus error, no pickle, and a
resident size of the tensors in hand. `safetensors` itself writes and reads the same files; the tests hold both together.

Limits: headers of at most 100 MB (the library's own limit), JSON files of at most 256 MB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nybble.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 256_000_000
INDEX_NAME = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of one file: where its bytes are, all claims checked."""

    name: str
    file: Path
    dtype: str
    """safetensors' name of the type, a key of `DTYPES`."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte from the start of the file."""
    nbytes: int


def section(config: Any, *keys: str) -> dict[str, Any]:
    """The object under `keys` of a JSON object, empty where there is none or it is no object."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; duplicate keys, other values than an object and oversize files are errors."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
        return _object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _object(data: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path}: the name {twice!r} occurs twice; write the file again")
        return result

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor that the safetensors file `path` claims, after checking the claims against its size.

    Raises:
        CheckpointError: truncated or oversized header, malformed entry, unknown type, negative or overflowing shape,
            offsets that overlap, leave gaps or pass the end of the file, a name that occurs twice.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: truncated: {size} bytes, less than its header needs; copy it again"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes, more than the limit of {MAX_HEADER_BYTES}"
                )
            header = _object(file.read(length), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    base = 8 + length
    entries = {name: _entry(path, name, claim, base) for name, claim in header.items()}
    at = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != at:
            raise CheckpointError(f"{path}: {entry.name!r} overlaps its neighbour or leaves a gap before it")
        at += entry.nbytes
    if at != size:
        raise CheckpointError(
            f"{path}: the header claims {at} bytes, the file has {size}; it is truncated or has a foreign tail"
        )
    return entries


def _entry(path: Path, name: str, claim: Any, base: int) -> Entry:
    if not isinstance(claim, dict) or set(claim) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: the entry {name!r} must have dtype, shape and data_offsets, no more")
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name!r} has the type {dtype!r}, which this reader does not know")
    if not _naturals(shape):
        raise CheckpointError(
            f"{path}: {name!r} has the shape {shape!r}; sizes must be whole numbers in [0, 2^63)"
        )
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name!r} has the offsets {offsets!r}; two whole numbers are needed")
    nbytes = DTYPES[dtype].itemsize
    for length in shape:
        nbytes *= length
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{path}: {name!r}: shape {shape} of {dtype} needs {nbytes} bytes, its offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return Entry(
        name=name, file=path, dtype=dtype, shape=tuple(shape), start=base + offsets[0], nbytes=nbytes
    )


def _naturals(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 16
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


@dataclass
class Folder:
    """A folder of safetensors files, as `save_pretrained` writes them.

    `problems` collects what `scan` found wrong between the index and the files; `open` raises the first of them.
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
            CheckpointError: no such folder, no safetensors, or the first problem of the index or of a header.
        """
        folder = cls.scan(path)
        if folder.problems:
            raise CheckpointError(folder.problems[0][1])
        if not folder.tensors:
            raise CheckpointError(f"{folder.path}: no tensors in it; name a folder with model.safetensors")
        return folder

    @classmethod
    def scan(cls, path: Path | str) -> Folder:
        """Open a folder and collect its problems, so that a validator can report all of them."""
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        config_path = path / "config.json"
        config = read_json(config_path) if config_path.exists() else {}
        folder = cls(path=path, config=config, tensors={})
        index = folder._index()
        files = sorted(set(index.values())) if index else sorted(p.name for p in path.glob("*.safetensors"))
        for name in files:
            if not (path / name).is_file():
                folder._problem(
                    "index-file", f"{path / name}: the index names this file, and it is not there"
                )
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
        return folder

    def _problem(self, check: str, sentence: str) -> None:
        self.problems.append((check, sentence))

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX_NAME
        if not path.exists():
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
        start, nbytes, shape = entry.start, entry.nbytes, entry.shape
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            row_bytes = nbytes // shape[0] if shape[0] else 0
            start, nbytes, shape = (
                start + first * row_bytes,
                (last - first) * row_bytes,
                (last - first, *shape[1:]),
            )
        if out is None:
            out = torch.empty(shape, dtype=DTYPES[entry.dtype])
        if (
            out.numel() * out.itemsize != nbytes
            or out.dtype != DTYPES[entry.dtype]
            or not out.is_contiguous()
        ):
            raise CheckpointError(
                f"{self.path}: {name!r} is {entry.dtype} {list(shape)}, not what was asked for"
            )
        _read_into(entry.file, start, out)
        return out


def _read_into(path: Path, start: int, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return
    view = out.flatten().view(torch.uint8).numpy().data
    try:
        with open(path, "rb", buffering=0) as file:
            while len(view):
                count = os.preadv(file.fileno(), [view[: 1 << 30]], start)
                if count == 0:
                    raise CheckpointError(f"{path}: ends early; it was truncated while it was being read")
                start += count
                view = view[count:]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
