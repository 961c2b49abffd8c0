"""Every quantiser once more, an element at a time, elements in exact fractions: an oracle of the oracle."""

import math
from fractions import Fraction

import numpy as np

f32 = np.float32
FLT_MAX = np.finfo(f32).max
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)
][:-1]
GRIDS = {"e2m1": E2M1, "e4m3": E4M3}
SIGN_BIT = {"e2m1": 8, "e4m3": 0x80}


def element(v: np.floating, grid: list[Fraction], sign_bit: int, draw: int | None = None) -> int:
    """Code of a finite v within the grid, by the definition in words."""
    a = Fraction(float(abs(v)))
    low = max(i for i, g in enumerate(grid) if g <= a)
    if grid[low] != a:
        f = (a - grid[low]) / (grid[low + 1] - grid[low])
        if draw is None:
            low += f > Fraction(1, 2) or (f == Fraction(1, 2) and low % 2 == 1)
        else:
            low += f + Fraction(2 * draw + 1, 1 << 17) >= 1
    return low | (sign_bit if math.copysign(1, v) < 0 else 0)


def value(code: int, name: str) -> np.float32:
    grid, sign = GRIDS[name], SIGN_BIT[name]
    return f32(-1 if code & sign else 1) * f32(float(grid[code & (sign - 1)]))


def clamp(v: np.floating, limit: float) -> np.floating:
    return max(min(v, f32(limit)), f32(-limit))


def e4m3_scale(v: np.floating) -> int:
    return element(min(v, f32(448)), E4M3, 0x80)


def s_enc(amax: np.floating, outer_max: float) -> np.floating:
    return f32(1) if amax == 0 else min(f32(outer_max) / f32(amax), FLT_MAX)


def nvfp4_encode(xs: list, sf: int, enc: np.floating, draws: list | None) -> list[int]:
    m = min(f32(1) / (value(sf, "e4m3") * (f32(1) / enc)), FLT_MAX)
    return [
        element(clamp(f32(x) * m, 6), E2M1, 8, None if draws is None else int(draws[i]))
        for i, x in enumerate(xs)
    ]


def power_of_two(amax: np.floating, outer_max: float) -> np.floating:
    """The smallest outer_max * 2^-k that is not below amax, searched for."""
    k = 140
    while amax and f32(math.ldexp(outer_max, -k)) < amax:
        k -= 1
    return f32(math.ldexp(outer_max, -k)) if amax else f32(amax)


def nvfp4_block(xs: list, amax: np.floating, draws: list | None = None) -> tuple[list[int], int]:
    enc = s_enc(amax, 2688)
    amax_b = max(abs(f32(x)) for x in xs)
    sf = e4m3_scale(amax_b * (enc * f32(1 / 6)))
    return nvfp4_encode(xs, sf, enc, draws), sf


def four_over_six_block(xs: list, amax: np.floating, draws: list | None = None) -> tuple[list[int], int]:
    enc = s_enc(amax, 1536)
    base = (max(abs(f32(x)) for x in xs) / f32(6)) * enc
    best = None
    for ratio in (1, 1.5):
        sf = e4m3_scale(base * f32(ratio))
        codes = nvfp4_encode(xs, sf, enc, draws)
        err = f32(0)
        for c, x in zip(codes, xs, strict=True):
            d = ((value(c, "e2m1") * value(sf, "e4m3")) * f32(amax)) / f32(1536) - f32(x)
            err = err + d * d
        if best is None or err < best[0]:
            best = (err, codes, sf)
    assert best is not None
    return best[1], best[2]


def mx_block(xs: list, name: str, rule: str, draws: list | None = None) -> tuple[list[int], int]:
    limit = 6.0 if name == "e2m1" else 448.0
    amax_b = max(abs(f32(x)) for x in xs)
    if rule == "up":
        want = float(amax_b * f32(1 / limit))
        byte = max(0, math.ceil(math.log2(want)) + 127) if want else 0
        while byte > 0 and 2.0 ** (byte - 1 - 127) >= want:
            byte -= 1
        while 2.0 ** (byte - 127) < want:
            byte += 1
    else:
        exponent = math.frexp(float(amax_b))[1] - 1 if amax_b >= f32(2.0**-126) else -127
        byte = min(max(exponent + 127 - (2 if name == "e2m1" else 8), 0), 254)
    m = f32(2.0 ** (127 - byte))
    codes = [
        element(
            clamp(f32(x) * m, limit), GRIDS[name], SIGN_BIT[name], None if draws is None else int(draws[i])
        )
        for i, x in enumerate(xs)
    ]
    return codes, byte


def fp8_block(xs: list, draws: list | None = None) -> tuple[list[int], np.floating]:
    amax_b = max(abs(f32(x)) for x in xs)
    s = f32(1) if amax_b == 0 else min(f32(448) / amax_b, FLT_MAX)
    codes = [
        element(clamp(f32(x) * s, 448), E4M3, 0x80, None if draws is None else int(draws[i]))
        for i, x in enumerate(xs)
    ]
    return codes, f32(1) / s


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, as printed in Salmon et al. 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draw(e: int, seed: int, step: int, micro: int, layer: int, operand: int) -> int:
    g, j = e >> 3, e & 7
    counter = [g & 0xFFFFFFFF, ((g >> 32) & 0xFFFF) | (micro << 16), step, (layer << 8) | operand]
    word = philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[j >> 1]
    return (word >> (16 * (j & 1))) & 0xFFFF
