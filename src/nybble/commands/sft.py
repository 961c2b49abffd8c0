"""`nybble sft`: settings from file and flags, then the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nybble.commands.runs import parse_run
from nybble.rl.sft import SFTConfig

FREE = ("model", "recipe", "out", "device", "threads", "schedule.steps")
FREE_SECTIONS = ("checkpoint.", "log.", "parallel.")
"""What may change when a run resumes."""


@dataclass(frozen=True, kw_only=True)
class SFTCommand:
    """Fine-tune a model on worked solutions of a task.

    `nybble sft tiny --task arithmetic --out runs/sft` makes a small model of bytes that can begin; a run or a
    folder in place of the preset goes on from that model.
    """

    settings: SFTConfig = field(default_factory=SFTConfig)
    config: Path | None = None
    """TOML file of settings, such as the config.toml of another run; flags win over it."""
    resume: bool = False
    """Go on with the run in --out from its newest checkpoint, with the settings of that run."""
    overwrite: bool = False
    """Delete the run in --out, if there is one, and start over."""


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    command = parse_run(arguments, SFTCommand(), "sft", FREE, FREE_SECTIONS)
    from nybble.rl.sft import fine_tune

    return fine_tune(command.settings, resume=command.resume, overwrite=command.overwrite)
