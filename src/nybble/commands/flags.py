"""Flags to a dataclass: tyro, with the errors of Nybble's own checks kept as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from typing import Any, TypeVar

import tyro

from nybble.errors import ConfigError, NybbleError

T = TypeVar("T")
FOLDERS = ("--out", "--data", "--against", "--export-to")


def parse_flags(cls: type[T], arguments: list[str], verb: str, default: T | None = None) -> T:
    """The dataclass that the words say, sections without a prefix.

    Raises the NybbleError of the dataclass's own checks; for other bad words prints why and exits with 2.
    """
    _check_words(cls, arguments)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            settings: dict[str, Any] = {
                "args": arguments,
                "prog": f"nybble {verb}",
                "config": (tyro.conf.OmitArgPrefixes,),
            }
            if default is not None:
                settings["default"] = default
            found: T = tyro.cli(cls, **settings)
            return found
    except SystemExit as stop:
        # tyro takes any ValueError for a word it could not convert, prints a box about it and exits.
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, NybbleError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        if stop.code:
            from nybble.together import another_says

            if another_says(stop):
                raise
        sys.stderr.write(printed.getvalue())
        raise


def _check_words(cls: type[Any], arguments: list[str]) -> None:
    """Raise ConfigError for words that tyro would take for others than were meant."""
    flags = [word.partition("=")[0].replace("_", "-") for word in arguments]
    for field in dataclasses.fields(cls):
        flag = "--" + field.name.replace("_", "-")
        if str(field.type).startswith("tuple") and flags.count(flag) > 1:  # the last alone would count
            raise ConfigError(
                f"{flag} is there {flags.count(flag)} times; give it once, with all of its values behind it"
            )
    for flag in FOLDERS:
        if [flag, ""] in (arguments[i : i + 2] for i in range(len(arguments))) or f"{flag}=" in arguments:
            raise ConfigError(f"{flag} is empty, which would be this folder; is a variable not set?")
