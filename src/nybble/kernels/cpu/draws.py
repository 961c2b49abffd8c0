"""Philox4x32-10 (Salmon et al. 2011) over runs of consecutive elements: eight 16-bit draws a counter."""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import U64
from nybble.kernels.cpu.jit import helper

LOW = U64(0xFFFFFFFF)
MULTIPLIER_0 = U64(0xD2511F53)
MULTIPLIER_1 = U64(0xCD9E8D57)
WEYL_0 = U64(0x9E3779B9)
WEYL_1 = U64(0xBB67AE85)


@helper
def fill_draws(start: Any, n: int, key: Any, words: Any) -> Any:
    """Fill `words` uint32 with the draws of elements start .. start + n - 1; return where the first one lies.

    key: uint64 [6] = key words k0, k1, micro-step << 16, counter words c2, c3, and what is added to `start`.
    Read `words` as uint16: the draw of element start + j is at position (returned offset) + j.
    """
    element = U64(start) + key[5]
    first = element >> U64(3)
    offset = np.int64(element & U64(7))  # int() would stay unsigned
    # Words fit in 32 bits; lanes of 64 let one multiply give both halves of the product.
    key0 = key[0] & LOW
    key1 = key[1] & LOW
    micro = key[2] & LOW
    step = key[3] & LOW
    operand = key[4] & LOW
    for i in range((offset + n + 7) >> 3):
        group = first + U64(i)
        c0 = group & LOW
        c1 = ((group >> U64(32)) & U64(0xFFFF)) | micro
        c2 = step
        c3 = operand
        k0 = key0
        k1 = key1
        for _ in range(10):
            p0 = MULTIPLIER_0 * c0
            p1 = MULTIPLIER_1 * c2
            c0 = (p1 >> U64(32)) ^ c1 ^ k0
            c1 = p1 & LOW
            c2 = (p0 >> U64(32)) ^ c3 ^ k1
            c3 = p0 & LOW
            k0 = (k0 + WEYL_0) & LOW
            k1 = (k1 + WEYL_1) & LOW
        at = U64(i) << U64(2)
        words[at] = np.uint32(c0)
        words[at + U64(1)] = np.uint32(c1)
        words[at + U64(2)] = np.uint32(c2)
        words[at + U64(3)] = np.uint32(c3)
    return offset
