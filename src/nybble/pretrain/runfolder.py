"""The folder of a run: what is written at its start, and who may write to it.

RUN/config.toml      settings, resolved        RUN/metrics.jsonl    one line a step
RUN/env.json         versions and device       RUN/checkpoints/     see nybble.checkpoints.store
RUN/precision.txt    operand formats, a GEMM   RUN/plots/loss.png
RUN/recipe.toml      what it was begun with
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from nybble import together
from nybble.errors import ConfigError

OWNED = (
    "config.toml",
    "env.json",
    "precision.txt",
    "recipe.toml",
    "metrics.jsonl",
    "checkpoints",
    "plots",
    "tensorboard",
    "rollouts",
)


class RunFolder:
    """An open run folder, locked against a second writer until the process ends."""

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        """Creates the folder, or takes over an existing run if `resume` or `overwrite` says so. Of several
        ranks, rank 0 does and holds the lock.

        Raises ConfigError if the folder holds a run and neither is given, or if another process writes to it.
        """
        self.path = path
        self._lock = together.on_main(lambda: self._open(resume, overwrite))

    def _open(self, resume: bool, overwrite: bool) -> int:
        path = self.path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"out: {path} is a file; name a folder")
        holds_run = any((path / name).exists() for name in ("config.toml", "metrics.jsonl", "checkpoints"))
        if resume and not holds_run:
            raise ConfigError(f"out: {path} holds no run to resume; leave out --resume to start one")
        if holds_run and not (resume or overwrite):
            raise ConfigError(
                f"out: {path} already holds a run; go on with --resume, start over with --overwrite, "
                "or name another folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        lock = self._take_lock()
        if overwrite and holds_run and not resume:
            for name in OWNED:
                target = path / name
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                else:
                    target.unlink(missing_ok=True)
        return lock

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def write(self, name: str, text: str) -> None:
        """Writes a small text file of the run, whole or not at all; rank 0 does."""
        if not together.is_main():
            return
        aside = self.path / f".{name}.unfinished"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.path / name)

    def close(self) -> None:
        if together.is_main():
            os.close(self._lock)

    def _take_lock(self) -> int:
        """The system drops the lock when the process dies, however it dies."""
        handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise ConfigError(
                f"out: another process is writing to {self.path}; stop it or name another folder"
            ) from None
        return handle


def environment(device: Any, status: str, ranks: int = 1) -> str:
    """What a reader needs to judge or repeat the run, as JSON: versions, device, revision of the code."""
    import torch

    versions = {}
    for name in ("nybble", "torch", "transformers", "numpy", "numba", "triton", "tokenizers", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = platform.processor() or platform.machine()
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": str(device),
        "hardware": hardware,
        "numerics": status,
        "ranks": ranks,
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "git_revision": _git_revision(),
        "command": sys.argv,
    }
    return json.dumps(facts, indent=1) + "\n"


def _git_revision() -> str | None:
    """Revision of the checkout that the package runs from; None for an installed wheel or without git."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        tracked = subprocess.run(
            ["git", "ls-files", "--error-unmatch", Path(__file__).name],
            cwd=here,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if tracked.returncode == 0 else None
