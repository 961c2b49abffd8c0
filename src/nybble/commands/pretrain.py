"""`nybble pretrain`: settings from preset, file and flags, then the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from nybble.commands.flags import parse_flags
from nybble.commands.runs import check_resumable, check_resume
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import load_toml
from nybble.pretrain.defaults import preset_defaults

FREE = (
    *("out", "data", "recipe", "device", "threads", "compile", "graph"),
    *("activation_checkpointing", "schedule.steps"),
)
FREE_SECTIONS = ("checkpoint.", "log.", "parallel.")
"""What may change when a run resumes; anything else would make it another run. Other steps bend the schedule
from there on; data and recipe are compared by what they hold, and may have moved; another number of threads
or ranks, another device or compiling may change last bits."""


@dataclass(frozen=True, kw_only=True)
class PretrainCommand:
    """Train a model from random weights.

    `nybble pretrain tiny --recipe inkling --data data/sotu --out runs/first` starts a run; the same line with
    --resume goes on after a kill, exactly. SIGTERM and Ctrl-C save after the current step and end with status
    143 and 130.
    """

    settings: PretrainConfig = field(default_factory=PretrainConfig)
    config: Path | None = None
    """TOML file of settings, such as the config.toml of another run; flags win over it."""
    resume: bool = False
    """Go on with the run in --out from its newest checkpoint, with the settings of that run."""
    overwrite: bool = False
    """Delete the run in --out, if there is one, and start over."""


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    command = parse(arguments)
    from nybble.pretrain.start import pretrain

    return pretrain(command.settings, resume=command.resume, overwrite=command.overwrite)


def parse(arguments: list[str]) -> PretrainCommand:
    """The command that the words mean, every setting resolved.

    The words are read twice: first to learn preset, file and run folder, then with what those say as
    defaults, so that the flags win. Raises ConfigError for settings that do not go together.
    """
    # Help waits for the second reading, which knows the preset's own defaults.
    first = _flags([word for word in arguments if word not in ("-h", "--help")], PretrainCommand())
    if not first.settings.preset and {"-h", "--help"} & set(arguments):
        _flags(arguments, PretrainCommand())
    if first.resume:
        return _parse_resume(arguments, first)
    preset, values = first.settings.preset, first.config
    if values is not None:
        preset = preset or load_toml(values, PretrainConfig()).preset
    base = preset_defaults(preset)
    if values is not None:
        base = dataclasses.replace(load_toml(values, base), preset=preset)
    return _flags(arguments, dataclasses.replace(first, settings=base))


def _parse_resume(arguments: list[str], first: PretrainCommand) -> PretrainCommand:
    folder = first.settings.run_folder
    saved = folder / "config.toml"
    check_resume(first, saved, "pretrain")
    base = load_toml(saved, PretrainConfig())
    command = _flags(arguments, dataclasses.replace(first, settings=base))
    check_resumable(base, command.settings, saved, FREE, FREE_SECTIONS)
    return command


def _flags(arguments: list[str], default: PretrainCommand) -> PretrainCommand:
    return parse_flags(PretrainCommand, arguments, "pretrain", default)
