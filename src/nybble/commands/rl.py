"""`nybble rl`: settings from file and flags, then the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nybble.commands.runs import parse_run
from nybble.rl.config import RLConfig

FREE = (
    "model",
    "recipe",
    "out",
    "device",
    "threads",
    "schedule.steps",
    "micro_tokens",
    "engine.url",
    "engine.timeout_s",
)
FREE_SECTIONS = ("checkpoint.", "log.", "watch.", "evaluation.")
"""What may change when a run resumes."""


@dataclass(frozen=True, kw_only=True)
class RLCommand:
    """Train a model on the rewards of a task.

    `nybble rl runs/sft --task arithmetic --out runs/rl` starts a run; the same line with --resume goes on
    after a kill, exactly, even in the middle of a step.
    """

    settings: RLConfig = field(default_factory=RLConfig)
    config: Path | None = None
    """TOML file of settings, such as the config.toml of another run; flags win over it."""
    resume: bool = False
    """Go on with the run in --out from its newest checkpoint, with the settings of that run."""
    overwrite: bool = False
    """Delete the run in --out, if there is one, and start over."""


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    command = parse_run(arguments, RLCommand(), "rl", FREE, FREE_SECTIONS)
    from nybble.rl.start import reinforce

    return reinforce(command.settings, resume=command.resume, overwrite=command.overwrite)
