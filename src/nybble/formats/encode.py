"""Scales and codes of blocks: the arithmetic that every kernel repeats bit for bit.

Per block, all in FP32, amax_b the largest magnitude, S_enc the outer scale (see `outer.py`), e4m3() nearest:

NVFP4, bit for bit as TransformerEngine (arXiv 2509.25149)::

    sf = e4m3(min(amax_b * (S_enc * (1/6)), FLT_MAX, 448));  code = e2m1(clamp(x * m, +-6))
    m = min(1 / (float(sf) * (1 / S_enc)), FLT_MAX)

Four Over Six (arXiv 2512.02010)::

    base = (amax_b / 6) * S_enc;  s6 = e4m3(min(base, 448));  s4 = e4m3(min(base * 1.5, 448))

Both are encoded as above. A candidate errs by the sum, element by element in logical row-major order, of the
square of ((code * sf) * amax) / 1536 - x; s4 wins only if its error is strictly smaller. With stochastic
rounding both candidates use the same draws and the rounded values decide.

Power-of-two outer scales are described in `outer.py`, MS-EDEN (rounding "eden") in `eden.py`.

MXFP8, MXFP4: scale byte as in `e8m0.py`; code = element(clamp(x * 2^(127 - byte), +-element_max)).
FP8: S = min(448 / amax_b, FLT_MAX), 1 where amax_b is 0; code = e4m3(clamp(x * S, +-448)); stored scale
1 / S.
BF16: nearest even. FP32: as is.

A block that holds a NaN or an infinity decodes to NaN throughout (scale byte 0x7F in E4M3, 255 in E8M0, NaN
in FP32; codes 0 in E2M1, 0x7F in E4M3) and leaves other blocks alone. The sign of a zero survives.

Legend: nr rows of blocks, nl blocks along the quantised axis, m elements of a block.
"""

import torch
from torch import Tensor

from nybble.formats import e2m1, e4m3, e8m0, eden
from nybble.formats import outer as outer_scale
from nybble.formats.fp32 import FLT_MAX, divide
from nybble.formats.table import E2M1_MAX, E4M3_MAX, Format


def encode(
    fmt: Format, x: Tensor, amax: Tensor | None, bad: Tensor, rounding: str, draws: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks.

    Args:
        x: finite FP32 [..., nr, nl, m].
        amax: the outer one, which broadcasts against [..., nr, nl]; None for formats of one level.
        bad: bool [..., nr, nl], blocks that held a NaN or an infinity.
        rounding: "nearest", "stochastic" or "eden".
        draws: int64 of the shape of x, None for "nearest".
    Returns:
        codes uint8 [..., nr, nl, m], one a byte, and scales uint8 or float32 [..., nr, nl].
    """
    if rounding == "eden":
        assert amax is not None
        assert draws is not None
        codes, scales = eden.encode(fmt, x, amax, bad, draws[..., 0])
    elif fmt.two_level:
        assert amax is not None
        codes, scales = _nvfp4(fmt, x, amax, draws)
    elif fmt.scale == "e8m0":
        codes, scales = _mx(fmt, x, draws)
    else:
        codes, scales = _fp8(fmt, x, draws)
    codes = torch.where(bad.unsqueeze(-1), 0 if fmt.packed else e4m3.NAN_BYTE, codes)
    nan = {"e4m3": e4m3.NAN_BYTE, "e8m0": e8m0.NAN_BYTE}.get(fmt.scale or "", float("nan"))
    return codes, torch.where(bad, nan, scales)


def _nvfp4(fmt: Format, x: Tensor, amax: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    s_enc = outer_scale.encode_scale(fmt, amax)
    amax_b = x.abs().amax(-1)
    if not fmt.four_over_six:
        sf = e4m3.encode((amax_b * (s_enc * (1 / E2M1_MAX))).clamp(max=E4M3_MAX))
        return _e2m1(x, sf, s_enc, draws), sf
    base = divide(amax_b, E2M1_MAX) * s_enc
    s6, s4 = (e4m3.encode((base * ratio).clamp(max=E4M3_MAX)) for ratio in (1.0, 1.5))
    c6, c4 = (_e2m1(x, s, s_enc, draws) for s in (s6, s4))
    four = _error(fmt, c4, s4, amax, x) < _error(fmt, c6, s6, amax, x)
    return torch.where(four.unsqueeze(-1), c4, c6), torch.where(four, s4, s6)


def _e2m1(x: Tensor, sf: Tensor, s_enc: Tensor, draws: Tensor | None) -> Tensor:
    m = divide(1.0, e4m3.decode(sf) * divide(1.0, s_enc)).clamp(max=FLT_MAX)
    return e2m1.encode((x * m.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX), draws)


def _error(fmt: Format, codes: Tensor, sf: Tensor, amax: Tensor, x: Tensor) -> Tensor:
    """Sum of squared errors of each block, one FP32 addition after the other: the order decides near ties."""
    assert fmt.outer_max is not None
    value = divide((e2m1.decode(codes) * e4m3.decode(sf).unsqueeze(-1)) * amax.unsqueeze(-1), fmt.outer_max)
    squares = (value - x) * (value - x)
    total = torch.zeros_like(squares[..., 0])
    for square in squares.unbind(-1):
        total = total + square
    return total


def _mx(fmt: Format, x: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    encode_scale = e8m0.encode_up if fmt.scale_rule == "up" else e8m0.encode_floor
    scales = encode_scale(x.abs().amax(-1), fmt.element_max)
    v = (x * e8m0.multiplier(scales).unsqueeze(-1)).clamp(-fmt.element_max, fmt.element_max)
    return _element(fmt, v, draws), scales


def _fp8(fmt: Format, x: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    amax_b = x.abs().amax(-1)
    s = torch.where(amax_b == 0, 1.0, divide(fmt.element_max, amax_b).clamp(max=FLT_MAX))
    v = (x * s.unsqueeze(-1)).clamp(-fmt.element_max, fmt.element_max)
    return _element(fmt, v, draws), divide(1.0, s)


def _element(fmt: Format, v: Tensor, draws: Tensor | None) -> Tensor:
    return e2m1.encode(v, draws) if fmt.packed else e4m3.encode(v, draws)
