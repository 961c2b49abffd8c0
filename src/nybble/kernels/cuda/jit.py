"""Triton under its two guises: compiled for a GPU, or interpreted on the CPU (TRITON_INTERPRET=1, for tests).

Kernels take `ASM`: where it is true they use single PTX instructions of Hopper and later for what Triton has
no spelling for (rounding towards zero, the reciprocal, E4M3 conversions); where it is false, the same
functions in plain Triton. Both give the same bits.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
MIN_CAPABILITY = (9, 0)


@cache
def use_asm(device: torch.device) -> bool:
    """Whether kernels on `device` may use Hopper's instructions."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def whole_key(key: Tensor) -> Tensor:
    """The int64 [4] that kernels read of a rounding key, whose `first` may be left out."""
    return key.contiguous() if key.shape[0] == 4 else pad(key, (0, 1))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one where kernels are interpreted."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
