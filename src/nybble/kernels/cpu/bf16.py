"""FP32 values rounded to BF16 and left in FP32, in one pass over memory."""

from typing import Any

import torch
from torch import Tensor

from nybble.kernels.cpu.bits import NAN, U32, as_bits, as_float, shift_right
from nybble.kernels.cpu.jit import kernel
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.source import flat
from nybble.kernels.cpu.threads import split

ELEMENTS = 1 << 14
"""Elements of a work item."""


@kernel
def _round(first: int, last: int, x: Any, y: Any) -> None:
    begin, end = first * ELEMENTS, min(last * ELEMENTS, x.shape[0])
    part, out = x[begin:end], y[begin:end]
    for i in range(end - begin):
        bits = as_bits(part[i])
        odd = U32(shift_right(bits, U32(16)) & U32(1))
        near = as_float(U32(U32(bits + U32(0x7FFF) + odd) & U32(0xFFFF0000)))
        out[i] = near if part[i] == part[i] else NAN


def rounded(x: Tensor) -> Tensor:
    """x.bfloat16().float() of an FP32 tensor on a CPU, contiguous."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return x.to(torch.bfloat16).float()  # a tensor without memory, or of another kind
    y = fresh(*x.shape)
    split(_round, -(-x.numel() // ELEMENTS), x.numel(), flat(x), flat(y))
    return y
