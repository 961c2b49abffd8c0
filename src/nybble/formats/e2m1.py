"""E2M1, the four-bit element of NVFP4 and MXFP4 (OCP MX v1.0): code = sign << 3 | index, no NaN, no infinity.

index       0    1    2    3    4    5    6    7
magnitude   0    0.5  1    1.5  2    3    4    6

Nearest: ties go to the even index (0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4).
Stochastic with a 16-bit draw r: with f the fraction of the way from the lower to the upper neighbour, the
magnitude rounds up if and only if f + (r + 0.5) / 2^16 >= 1. Truncating f to a multiple of 2^-17 does not
change that outcome, so integers decide it; a representable value never moves. The sign survives rounding to
zero: -0 and -0.1 give code 8.

Two codes share a byte: element 2i is the low nibble, element 2i + 1 the high one; an odd tail has a high
nibble of 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = VALUES[-1]


def encode(v: Tensor, draws: Tensor | None = None) -> Tensor:
    """Codes (uint8) of FP32 values within +-6, of their shape; stochastic where `draws` is given."""
    a = v.abs()
    index = _nearest(a) if draws is None else _stochastic(a, draws)
    return (index | (torch.signbit(v).to(torch.int64) << 3)).to(torch.uint8)


def _nearest(a: Tensor) -> Tensor:
    above = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    return torch.stack([t.to(torch.int64) for t in above]).sum(0)


def _stochastic(a: Tensor, r: Tensor) -> Tensor:
    """Each binade in units of its own step; the odd number 2r + 1 carries its 17 fraction bits over."""
    carry = 2 * r + 1
    halves = ((a * 2.0**18).to(torch.int64) + carry) >> 17  # steps of 0.5 below 2: index 0..4
    ones = (((a * 2.0**17).to(torch.int64) + carry) >> 17) + 2  # steps of 1 in [2, 4): index 4..6
    twos = (((a * 2.0**16).to(torch.int64) + carry) >> 17) + 4  # steps of 2 in [4, 6]: index 6..7
    return torch.where(a < 2.0, halves, torch.where(a < 4.0, ones, twos)).clamp(max=7)


def decode(codes: Tensor) -> Tensor:
    """FP32 values of codes 0..15, one a byte."""
    # By arithmetic: a CUDA graph cannot capture the copy of a table from the host.
    index = (codes & 7).to(torch.float32)
    size = torch.where(index < 4, index / 2, torch.where(index < 6, index - 2, 2 * index - 8))
    return torch.where(codes >= 8, -size, size)


def pack(codes: Tensor) -> Tensor:
    """Codes [..., L] to bytes [..., ceil(L / 2)]."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor, length: int) -> Tensor:
    """Bytes [..., ceil(length / 2)] to codes [..., length], one a byte."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]
