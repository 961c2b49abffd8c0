"""`nybble export`: the four-bit weights that training used, for serving programs."""

from __future__ import annotations

import tyro


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.export import ExportConfig, export

    print(export(tyro.cli(ExportConfig, args=arguments, prog="nybble export")).text())
    return 0
