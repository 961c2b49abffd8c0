"""`nybble import`: a checkpoint in any dialect to a model that trains."""

from __future__ import annotations

from nybble.commands.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.load import ImportConfig, import_

    print(import_(parse_flags(ImportConfig, arguments, "import")).text())
    return 0
