"""`nybble export`: the four-bit weights that training used, for serving programs."""

from __future__ import annotations

from nybble.commands.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.export import ExportConfig, export

    print(export(parse_flags(ExportConfig, arguments, "export")).text())
    return 0
