"""Whole runs of `nybble pretrain` on several ranks; each function runs on every rank."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

import micro

from nybble.commands import pretrain as command
from nybble.pretrain import loop


def pretrain(words: list[str], kill_at: int = -1) -> int:
    """`nybble pretrain WORDS`; the last rank is killed at the beginning of step `kill_at`."""
    micro.add_preset()
    if kill_at >= 0 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        once = loop.train_step

        def train_step(session: Any, step: int) -> Any:
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return once(session, step)

        loop.train_step = train_step
    return command.main(words)


def with_own_recipe(first: list[str], others: list[str]) -> int:
    """`nybble pretrain` with other words on ranks above 0."""
    return pretrain(first if os.environ["RANK"] == "0" else others)
