"""MS-EDEN (arXiv 2601.22813): NVFP4 whose elements are rounded to nearest and whose scales correct that.

Of a tensor that was transformed by a Hadamard of 128 with drawn signs. With o = (17/16) * 0.93, the share of
a block's range at which a nearest rounding errs least, and V = 6 / o, all in FP32::

    amax' = min(amax * fp32(2688 / (255.99 * V)), FLT_MAX)    stored as the outer amax; S_enc, S_dec from it
    sf    = e4m3(min(amax_b * ((S_enc * fp32(o)) * fp32(1/6)), 448))
    code  = e2m1(clamp(x * m, -6, 6))                         m as in NVFP4, to nearest
    u     = x * S_enc;  v = code * sf
    S     = sum u * u / sum u * v     over a run of 128 along the axis; 1 where the divisor is not above 0
    scale = e4m3(min(sf * S, 448))    rounded stochastically, with the draw of the block's first element

Sums go block by block: the elements of a block one after the other, then the blocks. Blocks with a NaN or an
infinity add nothing, and decode to NaN. What S restores is the length that rounding took: <x, value> = <x,
x> on average over the draws, and over the signs the rest of the error has no direction, so that the value is
unbiased.
"""

import numpy as np
import torch
from torch import Tensor

from nybble.formats import e2m1, e4m3
from nybble.formats import outer as outer_scale
from nybble.formats.fp32 import FLT_MAX, divide
from nybble.formats.table import E2M1_MAX, E4M3_MAX, Format

RUN = 128
SHARE = float(np.float32(17 / 16 * 0.93))
STRETCH = float(np.float32(2688 / (255.99 * (6 / (17 / 16 * 0.93)))))


def outer_amax(amax: Tensor) -> Tensor:
    """What is stored as the outer amax."""
    return (amax * STRETCH).clamp(max=FLT_MAX)


def encode(fmt: Format, x: Tensor, amax: Tensor, bad: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., nr, nl, 16]; bad (blocks to leave out) and draws are [..., nr, nl].

    `amax`, as stored, broadcasts against [..., nr, nl].
    """
    s_enc = outer_scale.encode_scale(fmt, amax)
    s_dec = divide(1.0, s_enc)
    sf = e4m3.encode((x.abs().amax(-1) * ((s_enc * SHARE) * (1 / E2M1_MAX))).clamp(max=E4M3_MAX))
    m = divide(1.0, e4m3.decode(sf) * s_dec).clamp(max=FLT_MAX)
    codes = e2m1.encode((x * m.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX))
    u = x * s_enc.unsqueeze(-1)
    v = e2m1.decode(codes) * e4m3.decode(sf).unsqueeze(-1)
    squares, products = (_run_sums(torch.where(bad.unsqueeze(-1), 0.0, u * t)) for t in (u, v))
    s = torch.where(products > 0, divide(squares, products), 1.0)
    s = s.repeat_interleave(RUN // x.shape[-1], -1)[..., : sf.shape[-1]]
    return codes, e4m3.encode((e4m3.decode(sf) * s).clamp(max=E4M3_MAX), draws)


def _run_sums(terms: Tensor) -> Tensor:
    """Sums over the runs of terms [..., nl, 16], in the stated order: [..., ceil(nl / 8)]."""
    per_run = RUN // terms.shape[-1]
    by_block = _in_order(terms)
    padded = torch.nn.functional.pad(by_block, (0, -by_block.shape[-1] % per_run))
    return _in_order(padded.unflatten(-1, (-1, per_run)))


def _in_order(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total
