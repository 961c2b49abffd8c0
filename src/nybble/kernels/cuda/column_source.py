"""What the column kernels read, described for a launch: values, or NVFP4 codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.kernels.cuda import sources
from nybble.kernels.cuda.jit import cdiv

TILE = 32
"""Tokens of a tile of whole columns, and what their groups begin at a multiple of."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is quantised along its tokens: values [lead, T, C], or NVFP4 codes of such."""

    shape: tuple[int, int, int]
    """Logical, (lead, T, C); C is a multiple of 8."""
    x: Tensor | None = None
    """[lead, T, C] with unit stride along C, BF16 or FP32, 16-byte aligned."""
    codes: Tensor | None = None
    scales: Tensor | None = None
    s_dec: Tensor | None = None
    """FP32, one, or one for each of the lead * T rows."""
    scale_rows: int = 1
    """Rows that share a block scale."""
    index: Tensor | None = None
    """int32 [T]: the row of the values or codes that each token is; its own where None."""
    factor: Tensor | None = None
    """FP32 [T]: what values are multiplied by, and rounded to their dtype, or the outer scales of codes."""
    zeros: Tensor | None = None
    """int32 zeros, one a whole column, that its amax may be found in."""

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        some = self.x if self.x is not None else self.codes
        assert some is not None
        return some.device

    @property
    def kind(self) -> int:
        """The kernels' SOURCE."""
        if self.x is None:
            return sources.NVFP4.value
        return (sources.BF16 if self.x.dtype == torch.bfloat16 else sources.FP32).value

    @property
    def pointer(self) -> Tensor | None:
        """x as the kernel gets it."""
        return self.x.view(torch.int32) if self.x is not None and self.x.dtype == torch.bfloat16 else self.x

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """x, codes, scales and S_dec as the kernels get them."""
        words = None if self.codes is None else self.codes.view(torch.int32)
        return self.pointer, words, self.scales, self.s_dec

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one row of x to the next, and from one matrix to the next."""
        return (0, 0) if self.x is None else (self.x.stride(1), self.x.stride(0))

    @property
    def row_scaled(self) -> bool:
        """The kernels' SDEC_ROWS."""
        return self.s_dec is not None and self.s_dec.numel() != 1


def as_source(x: Tensor) -> Source:
    """x [T, C] or [lead, T, C], copied only where its layout or its last columns need it."""
    if x.dtype == torch.float16:
        x = x.to(torch.float32)
    x = x.unsqueeze(0) if x.dim() == 2 else x
    columns = x.shape[-1]
    align = 16 // x.element_size()
    fits = (
        columns % 8 == 0
        and x.stride(-1) == 1
        and x.stride(0) % align == 0
        and x.stride(1) % align == 0
        and x.data_ptr() % 16 == 0
    )
    if not fits:
        copy = x.new_zeros(*x.shape[:-1], cdiv(columns, 8) * 8)
        copy[..., :columns] = x
        x = copy
    return Source(shape=(x.shape[0], x.shape[1], x.shape[2]), x=x)
