"""What a number is: formats, quantisers, the draws of stochastic rounding. The specification."""

from nybble.formats import ops
from nybble.formats.philox import Key, Operand, key
from nybble.formats.qtensor import QTensor, quantize
from nybble.formats.table import FORMATS, Format, get, names

__all__ = ["FORMATS", "Format", "Key", "Operand", "QTensor", "get", "key", "names", "ops", "quantize"]
