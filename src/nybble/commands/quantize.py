"""`nybble quantize`: four-bit weights of a model that was trained in high precision, and their error."""

from __future__ import annotations

from nybble.commands.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    from nybble.checkpoints.quantize import QuantizeConfig, quantize_model

    print(quantize_model(parse_flags(QuantizeConfig, arguments, "quantize")).text())
    return 0
