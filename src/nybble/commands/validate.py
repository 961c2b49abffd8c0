"""`nybble validate`: what is wrong with a four-bit checkpoint; status 1 if anything is."""

from __future__ import annotations

import tyro


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.validate import ValidateConfig, validate

    report = validate(tyro.cli(ValidateConfig, args=arguments, prog="nybble validate"))
    print(report.text())
    return report.status
