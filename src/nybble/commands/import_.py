"""`nybble import`: a checkpoint in any dialect to a model that trains."""

from __future__ import annotations

import tyro


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.load import ImportConfig, import_

    print(import_(tyro.cli(ImportConfig, args=arguments, prog="nybble import")).text())
    return 0
