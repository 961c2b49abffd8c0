"""E8M0, the scale of MXFP8 and MXFP4 (OCP MX v1.0): byte b is 2^(b - 127), byte 0 is 2^-127, 255 is NaN.

Up: the smallest power of two that is not below amax * (1 / element_max), the product in FP32. No element
saturates, so stochastic rounding is unbiased. On the FP32 bits of that product, exponent field e and
mantissa field m: e = 0: byte 1 if m > 0x400000 else 0 (2^-127 is the subnormal 0x400000); e = 255: 255;
else e + (m > 0).
Floor (OCP): the exponent of amax less the exponent of element_max (8 for E4M3, 2 for E2M1), clamped to
0..254. The largest elements may saturate.
Elements are multiplied by 2^(127 - byte), which is exact but for values far below the smallest element.
"""

import math

import torch
from torch import Tensor

from nybble.formats.fp32 import from_bits, magnitude_bits

NAN_BYTE = 255


def encode_up(amax: Tensor, element_max: float) -> Tensor:
    """Bytes (uint8) of the scales of blocks whose largest magnitudes are `amax` (FP32, finite or not)."""
    return round_up(amax * (1.0 / element_max))


def round_up(x: Tensor) -> Tensor:
    """Bytes (uint8) of the smallest powers of two not below `x` (FP32, >= 0); 255 above 2^127, Inf, NaN."""
    b = magnitude_bits(x)
    e, m = b >> 23, b & 0x7FFFFF
    up = torch.where(e == 0, (m > 0x400000).to(torch.int64), e + (m > 0).to(torch.int64))
    return up.clamp(max=NAN_BYTE).to(torch.uint8)


def encode_floor(amax: Tensor, element_max: float) -> Tensor:
    """The same by the OCP rule; the exponent field of a subnormal is 0. `amax` must be finite."""
    exponent = magnitude_bits(amax) >> 23
    return (exponent - int(math.log2(element_max))).clamp(0, 254).to(torch.uint8)


def decode(bytes_: Tensor) -> Tensor:
    """FP32 scales of bytes; 255 is NaN."""
    b = bytes_.to(torch.int64)
    value = from_bits(torch.where(b == 0, 0x00400000, b << 23))
    return torch.where(b == NAN_BYTE, torch.nan, value)


def multiplier(bytes_: Tensor) -> Tensor:
    """2^(127 - byte) in FP32, which elements are multiplied by before rounding. Byte 254 gives 2^-127."""
    b = bytes_.to(torch.int64).clamp(max=254)
    return from_bits(torch.where(b == 254, 0x00400000, (254 - b) << 23))
