"""SIGTERM and SIGINT: the first asks for a stop after the current step, the second ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from nybble import together


class StopRequest:
    """Context in which SIGTERM and SIGINT set `signum` and leave the saving to the loop.

    A run that was stopped this way is not finished, so it ends with 128 + signum (143 for SIGTERM, 130 for
    SIGINT), as schedulers and `&&` expect.
    """

    def __init__(self) -> None:
        self.signum = 0
        """What has reached this process. Only the handler writes it, which may come at any moment."""
        self.agreed = 0
        """What `agree` found at last."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def agree(self, device: torch.device | None = None) -> int:
        """The largest signal that has reached any rank, 0 for none: all stop after the same step."""
        self.agreed = together.largest(self.signum, device)
        return self.agreed

    def __exit__(
        self, _type: type | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signum:
            os._exit(128 + number)
        self.signum = number
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # no print: the signal may have interrupted one
            os.write(1, f"{name}: saving after this step; once more ends at once\n".encode())
