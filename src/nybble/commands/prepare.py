"""`nybble prepare`: text in, token shards out."""

from __future__ import annotations

from nybble.commands.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.data import PrepareConfig, prepare

    prepare(parse_flags(PrepareConfig, arguments, "prepare"))
    return 0
