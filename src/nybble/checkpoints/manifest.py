"""The manifest of a checkpoint: its step, what it belongs to, and the size and SHA-256 of each of its files.

It is written last, so a folder without one is unfinished, and it is checked before anything is read, so
that a truncated or altered file is named instead of half loaded. Nothing in a checkpoint is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from nybble.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1


def seal(folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Writes the manifest of all files in `folder` and forces the files to disk."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest = _digest(path, sync=True)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = {"format": FORMAT, "step": step, "identity": identity, "files": files}
    with open(folder / NAME, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its own form checked. Raises CheckpointError naming the file."""
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT
        complete = isinstance(manifest["step"], int) and isinstance(manifest["identity"], dict)
        complete = complete and isinstance(manifest["files"], dict)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it holds no {NAME}") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is corrupt; {_way_out(folder)}") from None
    if not known:
        raise CheckpointError(
            f"{path} is of format {manifest['format']}, but this version reads format {FORMAT}"
        )
    if not complete:
        raise CheckpointError(f"{path} is corrupt; {_way_out(folder)}")
    return manifest


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Compares each file with the manifest. Raises CheckpointError naming the first that differs."""
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing from the checkpoint; {_way_out(folder)}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {size} bytes, but was saved with {expected['bytes']}; {_way_out(folder)}"
            )
        if _digest(path) != expected["sha256"]:
            raise CheckpointError(
                f"{path} is corrupt: its checksum differs from the manifest's; {_way_out(folder)}"
            )


def _way_out(folder: Path) -> str:
    return f"delete {folder} to resume from the checkpoint before it"


def _digest(path: Path, sync: bool = False) -> str:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
