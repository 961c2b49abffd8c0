"""FP32 operations whose result must be the IEEE one on every device."""

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, correctly rounded. With a Python number torch may multiply by a reciprocal, which is not."""
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        raise TypeError("divide needs a tensor")
    top = a if isinstance(a, Tensor) else torch.full_like(like, a)
    bottom = b if isinstance(b, Tensor) else torch.full_like(like, b)
    return torch.div(top, bottom)


def bits(x: Tensor) -> Tensor:
    """The 32 bits of FP32 values, as non-negative int64."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def magnitude_bits(x: Tensor) -> Tensor:
    """The 31 bits below the sign of FP32 values, as int64."""
    return bits(x) & 0x7FFFFFFF


def from_bits(b: Tensor) -> Tensor:
    """FP32 values of int64 bit patterns below 2^31."""
    return b.to(torch.int32).view(torch.float32)
