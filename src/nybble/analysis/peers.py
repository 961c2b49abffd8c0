"""torchao's quantisers, to compare with where torchao is installed; it is no dependency."""

from __future__ import annotations

import contextlib
import io
import logging

import torch
from torch import Tensor

from nybble.analysis.clock import Call


def torchao_calls(x: Tensor) -> dict[str, Call]:
    """torchao's quantisers on x, by name; compiled on a GPU, eager on a CPU; none if it is not installed."""
    try:
        # Its import reports on standard error that it was built for other devices.
        with contextlib.redirect_stderr(io.StringIO()):
            logging.disable(logging.WARNING)
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import to_mx
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        return {}
    finally:
        logging.disable(logging.NOTSET)

    def mx(t: Tensor) -> object:
        return to_mx(t, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    first, second = nvfp4_quantize, mx
    if x.device.type == "cuda":
        first, second = torch.compile(first), torch.compile(second)
    return {"nvfp4_quantize": lambda: first(x), "to_mx": lambda: second(x)}
