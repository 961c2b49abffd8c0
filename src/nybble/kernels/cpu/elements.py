"""Rounding of already scaled elements, four loops that serve every element format and that LLVM vectorises.

With e the exponent bits of the magnitude a (not below the format's smallest normal), a float of exponent
e + 23 - p (p mantissa bits) has a unit in the last place equal to the format's step at a. Adding it
therefore rounds a to the nearest multiple m of the step, ties to even, and leaves m in the low bits of the
sum. Stochastic rounding takes a in units of 2^-17 steps, adds 2 r + 1 for the 16-bit draw r, and truncates.
From m both the code and the value follow. Magnitudes are clamped first, so Inf and NaN become the largest
code; the caller overwrites such blocks.
"""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import ABS, F32, INFINITY, SIGN, U32, U64, as_bits, as_float, shift_right
from nybble.kernels.cpu.jit import helper

# One row an element format: bits of the largest magnitude; bits of the smallest normal; its mantissa bits.
E2M1 = 0
E4M3 = 1
LARGEST = (U32(0x40C00000), U32(0x43E00000))  # 6, 448
NORMAL = (U32(0x3F800000), U32(0x3C800000))  # 1, 2^-6
MANTISSA = (U32(1), U32(3))
CODE_BITS = (U32(4), U32(8))


@helper
def nearest_codes(y: Any, n: int, element: int, codes: Any, at: int) -> None:
    """codes[at + i] = the code nearest to y[i], saturating; the sign is its highest bit."""
    largest, normal, p = LARGEST[element], NORMAL[element], MANTISSA[element]
    to_magic, to_index, to_sign = U32(U32(23 - p) << U32(23)), U32(23 - p), U32(32 - CODE_BITS[element])
    for i in range(n):
        b = as_bits(y[i])
        a = min(U32(b & ABS), largest)
        e = U32(max(a, normal) & INFINITY)
        magic = U32(e + to_magic)
        m = U32(as_bits(as_float(a) + as_float(magic)) - magic)
        code = U32(m + shift_right(U32(e - normal), to_index))
        codes[U64(at + i)] = np.uint8(U32(code | shift_right(U32(b & SIGN), to_sign)))


@helper
def nearest_values(y: Any, n: int, element: int, values: Any) -> None:
    """values[i] = the value nearest to y[i], as float32, saturating."""
    largest, normal = LARGEST[element], NORMAL[element]
    to_magic = U32(U32(23 - MANTISSA[element]) << U32(23))
    for i in range(n):
        b = as_bits(y[i])
        a = min(U32(b & ABS), largest)
        magic = as_float(U32(U32(max(a, normal) & INFINITY) + to_magic))
        values[i] = as_float(U32(as_bits((as_float(a) + magic) - magic) | U32(b & SIGN)))


@helper
def stochastic_codes(y: Any, n: int, draws: Any, drawn: int, element: int, codes: Any, at: int) -> None:
    """As `nearest_codes`, rounding up with the draws uint16 from position `drawn` on."""
    largest, normal, p = LARGEST[element], NORMAL[element], MANTISSA[element]
    to_units, to_index, to_sign = U32(U32(271 + p) << U32(23)), U32(23 - p), U32(32 - CODE_BITS[element])
    for i in range(n):
        b = as_bits(y[i])
        a = min(U32(b & ABS), largest)
        e = U32(max(a, normal) & INFINITY)
        units = np.int32(as_float(a) * as_float(U32(to_units - e)))
        m = U32(U32(U32(units) + U32(U32(draws[U64(drawn + i)]) << U32(1)) + U32(1)) >> U32(17))
        code = U32(m + shift_right(U32(e - normal), to_index))
        codes[U64(at + i)] = np.uint8(U32(code | shift_right(U32(b & SIGN), to_sign)))


@helper
def stochastic_values(y: Any, n: int, draws: Any, drawn: int, element: int, values: Any) -> None:
    """As `nearest_values`, rounding up with the draws uint16 from position `drawn` on."""
    largest, normal, p = LARGEST[element], NORMAL[element], MANTISSA[element]
    to_units, to_step = U32(U32(271 + p) << U32(23)), U32(p << U32(23))
    for i in range(n):
        b = as_bits(y[i])
        a = min(U32(b & ABS), largest)
        e = U32(max(a, normal) & INFINITY)
        units = np.int32(as_float(a) * as_float(U32(to_units - e)))
        m = np.int32(U32(U32(units) + U32(U32(draws[U64(drawn + i)]) << U32(1)) + U32(1)) >> U32(17))
        values[i] = as_float(U32(as_bits(F32(m) * as_float(U32(e - to_step))) | U32(b & SIGN)))
