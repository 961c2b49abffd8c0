"""Which implementation of an op runs: the fast one of the tensor's device, or the reference."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from nybble.formats import table

_log = logging.getLogger(__name__)

Check = Callable[[table.Format], str | None]

_checks: dict[str, Check] = {}
_lock = threading.Lock()
_forced = 0


def provide(device_type: str, check: Check) -> None:
    """Declare fast kernels for a device type; `check` says why a format has none there, or gives None."""
    _checks[device_type] = check


def can_run(device: torch.device | str, format: str) -> str | None:
    """Why the fast kernels of `device` do not serve `format`, in a few words; None if they do.

    Raises NybbleError for a format that the table does not have.
    """
    fmt = table.get(format)
    kind = torch.device(device).type
    if _forced:
        return "the reference is forced by reference_only()"
    if kind not in _checks:
        return f"there are no kernels for {kind} devices"
    return _checks[kind](fmt)


@cache
def say_once(reason: str) -> None:
    """Log, once a process, why a call on a GPU goes to the reference."""
    _log.info("the reference runs on the GPU: %s", reason)


def forced() -> bool:
    """Whether `reference_only` is in force."""
    return _forced > 0


@contextmanager
def reference_only() -> Iterator[None]:
    """Within this context, and in all threads of the process, ops run the plain-torch reference."""
    global _forced
    with _lock:
        _forced += 1
    try:
        yield
    finally:
        with _lock:
            _forced -= 1
