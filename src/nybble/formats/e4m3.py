"""E4M3, the eight-bit element of MXFP8 and FP8 and the block scale of NVFP4 (OCP MX v1.0, "fn" variant).

Byte = sign << 7 | exponent << 3 | mantissa, bias 7. Exponent 0 holds the subnormals, multiples of 2^-9; the
largest magnitude is 448 (0x7E); 0x7F and 0xFF are NaN and there is no infinity. Zero keeps its sign (0x80 is
-0).

Nearest: ties go to the even byte, in integer arithmetic on the FP32 bits; torch's own float8 casts are not
used because what they do above 464 changed between versions. Callers clamp to +-448 first.
Stochastic with a 16-bit draw r: the magnitude rounds up if and only if f + (r + 0.5) / 2^16 >= 1, f the
fraction of the way between the two neighbours. From 2^-6 on, f is the low 20 of the FP32 bits: add
(r << 4) + 8, which carries, and drop them. Below, in units of the subnormal step,
index = (trunc(|v| * 2^26) + 2r + 1) >> 17.
"""

import torch
from torch import Tensor

from nybble.formats.fp32 import magnitude_bits

MAX = 448.0
MAX_BYTE = 0x7E
NAN_BYTE = 0x7F
_MIN_NORMAL = 2.0**-6
_REBIAS = (127 - 7) << 3  # of the exponent, in units of a byte


def encode(v: Tensor, draws: Tensor | None = None) -> Tensor:
    """Bytes (uint8) of FP32 values within +-448, of the same shape; stochastic where `draws` is given."""
    a = v.abs()
    b = magnitude_bits(v)
    if draws is None:
        normal = (b + 0x7FFFF + ((b >> 20) & 1)) >> 20
        subnormal = torch.round(a * 2.0**9).to(
            torch.int64
        )  # torch.round takes ties to even; 8 is the first normal
    else:
        normal = (b + (draws << 4) + 8) >> 20
        subnormal = ((a.clamp(max=1.0) * 2.0**26).to(torch.int64) + 2 * draws + 1) >> 17
    index = torch.where(a < _MIN_NORMAL, subnormal, normal - _REBIAS).clamp(0, MAX_BYTE)
    return (index | (torch.signbit(v).to(torch.int64) << 7)).to(torch.uint8)


def decode(bytes_: Tensor) -> Tensor:
    """FP32 values of bytes; 0x7F and 0xFF are NaN."""
    return _table(bytes_.device)[bytes_.to(torch.int64)]


def _table(device: torch.device) -> Tensor:
    byte = torch.arange(256, device=device)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).to(torch.float32)
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where((byte & 0x7F) == NAN_BYTE, torch.nan, value)
    return torch.where(byte >= 128, -value, value)
