"""Nybble trains language models in four bits, end to end."""

__version__ = "0.1.0"
