"""Block scales from block amaxes: the stored scale, the factor for elements, and the decoded scale.

All arrays hold one entry for each of n blocks. `peak` uint32 are the bits of the largest magnitude, at or
above Inf's where the block holds a NaN or an infinity; such a block gets the NaN scale, factor 0 and a
decoded scale of NaN. Each function returns whether there was one.
"""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import F32, FLT_MAX, INFINITY, NAN, U32, as_bits, as_float
from nybble.kernels.cpu.jit import helper

RULE_E4M3 = 0
RULE_E8M0_UP = 1
RULE_E8M0_FLOOR = 2
RULE_FP32 = 3

ONE = F32(1)
SIXTH = F32(1 / 6)
SIX = F32(6)
SUBNORMAL = U32(0x00400000)  # bits of 2^-127, E8M0's smallest scale
E4M3_LARGEST = U32(0x43E00000)  # bits of 448
E4M3_NORMAL = U32(0x3C800000)  # bits of 2^-6
E4M3_MAGIC = U32(20 << 23)  # see `elements.py`
NAN_E4M3 = np.uint8(0x7F)
NAN_E8M0 = np.uint8(0xFF)


@helper
def outer_scales(amax: Any, n: int, outer_max: Any, encode: Any, decode: Any) -> None:
    """S_enc and S_dec of outer amaxes."""
    for i in range(n):
        s = min(F32(outer_max) / amax[i], FLT_MAX)
        if amax[i] == F32(0) or s == F32(0):
            s = ONE
        encode[i] = s
        decode[i] = ONE / s


@helper
def power_of_two(amax: Any, outer_max: Any) -> Any:
    """The smallest outer_max * 2^-k that is not below an outer amax; 0 stays 0."""
    s = min(F32(outer_max) / amax, FLT_MAX)
    down = as_float(U32(as_bits(s) & INFINITY))
    return amax if amax == F32(0) else min(F32(outer_max) / down, FLT_MAX)


@helper
def e4m3_scales(
    peak: Any,
    n: int,
    ratio: Any,
    four_over_six: bool,
    s_enc: Any,
    s_dec: Any,
    byte: Any,
    factor: Any,
    decoded: Any,
) -> bool:
    """NVFP4's E4M3 scales. Four Over Six has its own order of operations, and a `ratio` of 1 or 1.5."""
    worst = U32(0)
    for i in range(n):
        worst = max(worst, peak[i])
        bad = peak[i] >= INFINITY
        amax = as_float(peak[i])
        target = ((amax / SIX) * s_enc[i]) * F32(ratio) if four_over_six else amax * (s_enc[i] * SIXTH)
        a = min(as_bits(target), E4M3_LARGEST)
        e = U32(max(a, E4M3_NORMAL) & INFINITY)
        magic = U32(e + E4M3_MAGIC)
        total = as_float(a) + as_float(magic)
        scale = total - as_float(magic)
        code = np.uint8(U32(as_bits(total) - magic) + U32(e >> U32(20)) - U32(968))
        multiple = min(ONE / (scale * s_dec[i]), FLT_MAX)
        byte[i] = NAN_E4M3 if bad else code
        factor[i] = F32(0) if bad else multiple
        decoded[i] = NAN if bad else scale
    return worst >= INFINITY


@helper
def e8m0_scales(
    peak: Any, n: int, floor: bool, reciprocal: Any, exponent: Any, byte: Any, factor: Any, decoded: Any
) -> bool:
    """E8M0 scales: up from amax * reciprocal, or by the floor rule with the exponent of element_max."""
    worst = U32(0)
    for i in range(n):
        worst = max(worst, peak[i])
        if floor:
            b = max(np.int32(peak[i] >> U32(23)) - np.int32(exponent), np.int32(0))
        else:
            bits = as_bits(as_float(peak[i]) * F32(reciprocal))
            e = np.int32(bits >> U32(23))
            m = U32(bits & U32(0x7FFFFF))
            threshold = SUBNORMAL if e == 0 else U32(0)
            b = e + np.int32(1 if m > threshold else 0)
        bad = peak[i] >= INFINITY or b > 254
        u = U32(min(b, np.int32(254)))
        byte[i] = NAN_E8M0 if bad else np.uint8(u)
        scale = SUBNORMAL if u == U32(0) else U32(u << U32(23))
        inverse = SUBNORMAL if u == U32(254) else U32(U32(U32(254) - u) << U32(23))
        factor[i] = F32(0) if bad else as_float(inverse)
        decoded[i] = NAN if bad else as_float(scale)
    return worst >= INFINITY


@helper
def fp32_scales(peak: Any, n: int, element_max: Any, stored: Any, factor: Any) -> bool:
    """FP32 scales of FP8 blocks: elements times S = element_max / amax, stored 1 / S."""
    worst = U32(0)
    for i in range(n):
        worst = max(worst, peak[i])
        bad = peak[i] >= INFINITY
        s = ONE if peak[i] == U32(0) else min(F32(element_max) / as_float(peak[i]), FLT_MAX)
        stored[i] = NAN if bad else ONE / s
        factor[i] = F32(0) if bad else s
    return worst >= INFINITY
