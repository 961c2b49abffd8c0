"""Folders that are whole or not there."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nybble.errors import NybbleError


@contextmanager
def whole_folder(out: Path, failure: type[NybbleError]) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` if the block ends well, and vanishes if it does not.

    An older `out`, folder or file, is replaced only then. A failure to write is a `failure` that says what to
    do.
    """
    prefix = f".{out.name}.partial-{socket.gethostname()}-"
    folder = out.parent / f"{prefix}{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out.parent, prefix)
        folder.mkdir()
        yield folder
        retired = None
        if out.exists():
            retired = out.parent / f"{prefix}{os.getpid()}-old"
            out.rename(retired)
        try:
            folder.rename(out)
        except OSError:
            if retired:
                retired.rename(out)
            raise
        if retired:
            shutil.rmtree(retired, ignore_errors=True) if retired.is_dir() else retired.unlink()
        _sync_folder(out.parent)
    except OSError as error:
        raise failure(
            f"cannot write {out}: {error.strerror or error}; free some space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what runs on this machine left behind that were killed outright."""
    for folder in parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).removesuffix("-old")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
