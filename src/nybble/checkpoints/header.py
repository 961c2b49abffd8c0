"""Headers of safetensors files that nobody vouches for, and JSON beside them.

Everything a header claims is checked against the size of its file before a byte is allocated for it. There is
no pickle. Limits: headers of at most 100 MB (the limit of the `safetensors` library), JSON files of at most
256 MB.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nybble.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 256_000_000

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


def absent(path: Path) -> str | None:
    """Why there is no file to read at `path`, as the rest of a sentence about it; None if there is one."""
    if path.is_file():
        return None
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which is not there; fetch or copy what it points to"
    return "is no file" if path.exists() else "is not there"


def check_folder(path: Path) -> None:
    """CheckpointError unless `path` is a folder."""
    if not path.is_dir():
        why = "is a file; name the folder that holds it" if path.is_file() else "no such folder"
        raise CheckpointError(f"{path}: {why}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; duplicate keys, other values than objects and oversize files are errors."""
    if path.is_symlink() and (why := absent(path)):
        raise CheckpointError(f"{path}: {why}")
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
        CheckpointError: truncated or oversized header, malformed entry, unknown type, negative or overflowing
            shape,
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
            f"{path}: the header claims {at} bytes, the file has {size}; it is cut or has a foreign tail"
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
