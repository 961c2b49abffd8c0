"""A folder of checkpoints, each written aside and renamed when whole: a kill or a full disk leaves no half
of one.

checkpoints/step_00000200/
    manifest.json        step, identity of the run, size and SHA-256 of every file
    state.json           position in the data, clock and whatever else is no tensor
    tensors/*.safetensors    model, optimiser and random generators (torch.distributed.checkpoint)
    model/               a transformers folder: config, weights, tokeniser, recipe
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nybble import together
from nybble.checkpoints.manifest import NAME, read_manifest, seal, verify
from nybble.checkpoints.tensors import save_tensors
from nybble.errors import CheckpointError

_STEP = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, its files verified."""

    path: Path
    step: int
    identity: dict[str, Any]
    state: dict[str, Any]

    @property
    def tensors(self) -> Path:
        """Folder of the tensors, for `load_tensors`."""
        return self.path / "tensors"


def write(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    identity: dict[str, Any],
    extras: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the checkpoint of `step` under `root` and returns its folder. `extras` adds files to the folder.

    Of several ranks all call it, on a file system that they share: each writes its shards, rank 0 the rest.
    Either the whole checkpoint is there afterwards, or none of it is. Raises CheckpointError if the disk is
    full.
    """
    target = root / f"step_{step:08d}"
    aside = root / f"{_UNFINISHED}{target.name}"

    def begin() -> None:
        sweep(root)
        aside.mkdir(parents=True)
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    def finish() -> None:
        seal(aside, step, identity)
        if target.exists():  # only a run that was resumed from an older checkpoint gets here
            target.rename(root / f"{_UNFINISHED}replaced-{target.name}")
        aside.rename(target)
        _sync_folder(root)
        sweep(root)

    try:
        together.on_main(begin)
        together.all_or_none(lambda: save_tensors(aside / "tensors", tensors))
        if extras is not None:
            extras(aside)
        together.on_main(finish)
    except BaseException as error:
        if together.is_main():
            shutil.rmtree(aside, ignore_errors=True)
        if is_disk_full(error):
            kept = latest(root)
            rest = f"the checkpoint {kept} is intact" if kept else "there is no older checkpoint"
            raise CheckpointError(
                f"the disk is full, so step {step} could not be saved in {root}; {rest}"
            ) from None
        raise
    return target


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None; unfinished ones are passed over."""
    found = _steps(root)
    return found[-1][1] if found else None


def read(path: Path) -> Checkpoint:
    """Verifies a checkpoint and reads all but its tensors. Raises CheckpointError naming the bad file."""
    manifest = read_manifest(path)
    verify(path, manifest)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path=path, step=manifest["step"], identity=manifest["identity"], state=state)


def prune(root: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints."""
    for _, path in _steps(root)[:-keep]:
        aside = root / f"{_UNFINISHED}old-{path.name}"
        path.rename(aside)  # so that a kill in the middle leaves no half of a checkpoint behind
        shutil.rmtree(aside, ignore_errors=True)


def sweep(root: Path) -> None:
    """Deletes what a killed process left unfinished under `root`."""
    if root.is_dir():
        for path in root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of any layer means that no space, or no quota, is left."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports a failed write as text
    text = str(error)
    return any(f"os error {number}" in text for number in (errno.ENOSPC, errno.EDQUOT))


def _steps(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_STEP.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match and (path / NAME).is_file())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
