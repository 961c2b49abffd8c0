"""TOML files to and from settings; unknown keys fail with the nearest known ones."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from nybble.errors import ConfigError

T = TypeVar("T")
_MARK = "# settings of nybble "


def load_toml(path: Path, base: T) -> T:
    """`base` with the values of the TOML file at `path` in place of its own.

    Raises ConfigError if the file is missing or malformed, or holds a key or a value that `base` cannot take.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such settings file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return merge(base, values, source=str(path))


def merge(base: T, values: dict[str, Any], source: str, section: str = "") -> T:
    """`base` (a dataclass) with `values` in place of its own; `source` names their origin in messages."""
    hints = _hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}{key}"
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {name!r}{_suggest(key, type(base), section)}")
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{source}: {name} is a section, so write [{name}] with its keys below")
            changes[key] = merge(current, value, source, f"{name}.")
        else:
            changes[key] = _coerce(value, hints[key], name, source)
    try:
        return dataclasses.replace(base, **changes)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{source}: {section}{error}") from None


def dump_run(config: Any, verb: str) -> str:
    """The settings of a run of `verb`, which `check_verb` reads again."""
    return f"{_MARK}{verb}\n{dump(config)}"


def check_verb(file: Path, verb: str) -> None:
    """Raise ConfigError if `file` holds the settings of a run of another verb."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        first = lines.readline().strip()
    if first.startswith(_MARK) and first != _MARK + verb:
        other = first.removeprefix(_MARK)
        raise ConfigError(
            f"out: {file.parent} holds a run of `nybble {other}`; resume it with that, or name another folder"
        )


def dump(config: Any) -> str:
    """The settings as TOML; fields that are None are left out, since TOML has no null."""
    return tomli_w.dumps(_plain(config))


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting under its dotted name."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{item.name}.")
        else:
            flat[prefix + item.name] = value
    return flat


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            plain[item.name] = _plain(value)
        elif value is not None:
            plain[item.name] = str(value) if isinstance(value, Path) else value
    return plain


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _suggest(key: str, cls: type, section: str) -> str:
    """Near matches of a mistyped key, those of other sections included, since that is the usual slip."""
    known: dict[str, str] = {}
    for item in dataclasses.fields(cls):
        known[item.name] = section + item.name
        if dataclasses.is_dataclass(_hints(cls)[item.name]):
            for inner in dataclasses.fields(_hints(cls)[item.name]):
                known.setdefault(inner.name, f"{section}{item.name}.{inner.name}")
    near = difflib.get_close_matches(key, known, n=3)
    if near:
        return "; did you mean " + " or ".join(known[name] for name in near) + "?"
    return f"; known keys here: {', '.join(item.name for item in dataclasses.fields(cls))}"


def _coerce(value: Any, hint: Any, name: str, source: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            if value in typing.get_args(kind):
                return value
            allowed = ", ".join(map(str, typing.get_args(kind)))
            near = difflib.get_close_matches(str(value), typing.get_args(kind), n=1)
            hint_text = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{source}: {name} is {value!r}, but must be one of {allowed}{hint_text}")
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is str and isinstance(value, str):
            return value
        if kind is Path and isinstance(value, str):
            return Path(value)
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise ConfigError(f"{source}: {name} is {value!r}, but must be of type {wanted.replace('Path', 'str')}")
