"""Nybble trains language models in four bits, end to end."""

from nybble import formats
from nybble.formats import QTensor, key, quantize

__all__ = ["QTensor", "formats", "key", "quantize"]

__version__ = "0.1.0"
