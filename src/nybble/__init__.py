"""Nybble trains language models in four bits, end to end."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nybble import formats
    from nybble.formats import QTensor, key, quantize
    from nybble.parallel import convert
    from nybble.recipes import load_recipe

__all__ = ["QTensor", "convert", "formats", "key", "load_recipe", "quantize"]

_HOME = {
    "QTensor": "nybble.formats",
    "convert": "nybble.parallel",
    "key": "nybble.formats",
    "load_recipe": "nybble.recipes",
    "quantize": "nybble.formats",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use, so that `nybble --help` does not pay for importing torch.
    if name == "formats" or _HOME.get(name) == "nybble.formats":
        importlib.import_module("nybble.kernels")  # the same bits, fast
    if name == "formats":
        return importlib.import_module("nybble.formats")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nybble' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
