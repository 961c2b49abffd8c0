"""Passes between a model's products on NVIDIA GPUs: Triton kernels, each with its backward pass.

What `cpu/` has for CPUs: a pass reads what it needs once, computes in FP32 on registers and writes 16 bits
where the next product takes 16 bits. Sums over tokens go through one partial sum a program, in a fixed order,
so that they have the same bits on every run. NYBBLE_PLAIN_PASSES=1 computes all of it by plain torch instead.
"""

import importlib.util
import logging
import os
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def on_gpu(x: Tensor) -> bool:
    """Whether these passes serve `x`: eager tensors on the current GPU, if that can run them."""
    if not x.is_cuda or os.environ.get("NYBBLE_PLAIN_PASSES") == "1":
        return False
    if torch.compiler.is_compiling() or _why_not(x.device) is not None:
        return False
    return x.device.index == torch.cuda.current_device()  # where Triton launches


@cache
def _why_not(device: torch.device) -> str | None:
    """Why a GPU cannot run them; logged, since plain torch does it then."""
    if importlib.util.find_spec("triton") is None:
        reason: str | None = "triton is not installed"
    else:
        from nybble.kernels.cuda import reasons

        reason = reasons.device(device)
    if reason is not None:
        _log.info("passes between products go through plain torch: %s", reason)
    return reason
