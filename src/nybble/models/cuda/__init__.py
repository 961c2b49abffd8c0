"""Passes between a model's products on NVIDIA GPUs: Triton kernels, each with its backward pass.

What `cpu/` has for CPUs: a pass reads what it needs once, computes in FP32 on registers and writes 16 bits
where the next product takes 16 bits. Sums over tokens go through one partial sum a program, in a fixed order,
so that they have the same bits on every run. NYBBLE_PLAIN_PASSES=1 computes all of it by plain torch instead.
"""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MIN_CAPABILITY = (8, 0)
PLAIN = os.environ.get("NYBBLE_PLAIN_PASSES") == "1"


def on_gpu(x: Tensor) -> bool:
    """Whether these passes serve `x`: eager tensors on an NVIDIA GPU that computes in BF16."""
    return x.is_cuda and not PLAIN and not torch.compiler.is_compiling() and _served(x.device)


@cache
def _served(device: torch.device) -> bool:
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
