"""`nybble validate`: what is wrong with a four-bit checkpoint; status 1 if anything is."""

from __future__ import annotations

from nybble.commands.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.validate import ValidateConfig, validate

    report = validate(parse_flags(ValidateConfig, arguments, "validate"))
    print(report.text())
    return report.status
