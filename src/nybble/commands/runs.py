"""What verbs that make runs share: settings from a file or the run that resumes, and flags that win."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from nybble.commands.flags import parse_flags
from nybble.errors import ConfigError
from nybble.pretrain.configfile import check_verb, flatten, load_toml

T = TypeVar("T")
"""A dataclass with `settings`, `config`, `resume` and `overwrite`; its settings have `out`."""


def parse_run(
    arguments: list[str], default: T, verb: str, free: tuple[str, ...], free_sections: tuple[str, ...]
) -> T:
    """The command that the words mean, every setting resolved.

    The words are read twice: first to learn file and run folder, then with what those say as defaults.
    Raises ConfigError for settings that do not go together.
    """
    first: Any = parse_flags(type(default), arguments, verb, default)
    if not first.resume:
        if first.config is None:
            return first
        settings = load_toml(first.config, type(first.settings)())
        return parse_flags(type(default), arguments, verb, dataclasses.replace(first, settings=settings))
    saved = first.settings.out / "config.toml"
    check_resume(first, saved, verb)
    base = load_toml(saved, type(first.settings)())
    command: Any = parse_flags(type(default), arguments, verb, dataclasses.replace(first, settings=base))
    check_resumable(base, command.settings, saved, free, free_sections)
    return command


def check_resume(command: Any, saved: Path, verb: str) -> None:
    """Raise ConfigError for flags that do not go with --resume, or where there is nothing to resume."""
    if command.overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite deletes it; give one of them")
    if command.config is not None:
        raise ConfigError(f"--resume takes its settings from {saved}; leave out --config")
    if not saved.is_file():
        raise ConfigError(f"out: {saved.parent} holds no run to resume; leave out --resume to start one")
    check_verb(saved, verb)


def check_resumable(
    saved: Any, asked: Any, file: Path, free: tuple[str, ...], free_sections: tuple[str, ...]
) -> None:
    """Raise ConfigError naming a setting that differs from the saved run's and is not free to."""
    before, after = flatten(saved), flatten(asked)
    for name, value in after.items():
        if value != before[name] and name not in free and not name.startswith(free_sections):
            flag = name.rpartition(".")[2]
            raise ConfigError(
                f"{flag} is {_text(value)}, but the run to resume has {_text(before[name])} ({file}); "
                "leave the flag out, or start another run with another --out"
            )


def _text(value: Any) -> str:
    if value == "":
        return "not set"
    return str(value) if isinstance(value, Path) else repr(value)
