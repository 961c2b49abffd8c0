"""A GEMM operand that stays in codes: it stands where its values would. Not yet run on this hardware."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.errors import NybbleError
from nybble.formats import table
from nybble.kernels.blackwell.swizzle import round_up

ALIGN = 16
"""Bytes of a row of codes, and rows of the second operand, come in multiples of this."""


@dataclass(frozen=True, eq=False)
class Coded:
    """Codes and block scales without an outer scale, the contracted axis last whatever the logical order."""

    codes: Tensor
    """uint8 [..., R, L], two E2M1 codes a byte."""
    scales: Tensor
    """uint8 [..., R, ceil(L / block)], linear; square blocks are spread to one scale a row."""
    format: str
    length: int
    """Values along the contracted axis."""
    ends: Tensor | None = None
    """int64 [G]: where groups end along a contracted axis of packed token groups, in values."""

    @property
    def block(self) -> int:
        """Values that share a scale."""
        block = table.get(self.format).block_cols
        assert block is not None
        return block

    def t(self) -> "Coded":
        """Itself: the order of the logical axes says nothing about storage."""
        return self

    def index_select(self, dim: int, index: Tensor) -> "Coded":
        """Rows `index` of a 2-D operand, in another order or repeated; `dim` is 0."""
        codes, scales = (t.index_select(dim, index) for t in (self.codes, self.scales))
        return Coded(codes, scales, self.format, self.length)

    def __getitem__(self, index: Tensor) -> "Coded":
        return self.index_select(0, index)

    def turned(self) -> "Coded":
        """Square blocks contracted over the other axis: the same values, stored the other way round."""
        fmt = table.get(self.format)
        if not fmt.square:
            raise NybbleError(f"{self.format} has blocks along one axis only; quantise along the other one")
        values = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)[..., : self.length]
        values = values.transpose(-2, -1)
        values = F.pad(values, (0, values.shape[-1] % 2))
        codes = values[..., ::2] | (values[..., 1::2] << 4)
        squares = self.scales[..., :: fmt.block_rows, :].transpose(-2, -1)
        scales = squares.repeat_interleave(fmt.block_rows, -2)[..., : self.length, :]
        return Coded(codes, scales, self.format, self.codes.shape[-2])

    def padded_codes(self, rows: bool = False) -> Tensor:
        """Codes whose rows are whole lines of 16 bytes in aligned storage; with `rows`, 16 rows at a time.

        Zeros are added, which add nothing to a product.
        """
        height, width = self.codes.shape[-2:]
        more = round_up(height, ALIGN) - height if rows else 0
        # K of the block formats is a multiple of 32: 16 bytes of E2M1, two lines of E4M3.
        line = ALIGN if table.get(self.format).packed else 2 * ALIGN
        wide = round_up(width, line) - width
        codes = F.pad(self.codes, (0, wide, 0, more)) if wide or more else self.codes.contiguous()
        return codes.clone() if codes.storage_offset() % ALIGN else codes


def coded(
    codes: Tensor, scales: Tensor, format: str, shape: tuple[int, ...], axis: int, offs: Tensor | None = None
) -> Coded:
    """What `nybble::quantize` gave for a tensor of `shape` along `axis`, as an operand.

    Args:
        codes: uint8, the quantised axis last.
        scales: uint8, linear.
        format: an NVFP4 or MXFP8 name.
        shape: of the logical tensor, 2-D or 3-D.
        axis: -1 or -2, the contracted one.
        offs: int32 [G], for axis -2 of a 2-D tensor: token groups, each packed in blocks of its own.
    """
    fmt = table.get(format)
    if fmt.square:
        rows = shape[-2] if axis == -1 else shape[-1]
        scales = scales.repeat_interleave(fmt.block_rows, -2)[..., :rows, :]
    if offs is None or axis == -1:
        return Coded(codes, scales, format, shape[axis])
    block = fmt.block_cols
    assert block is not None
    stops = offs.to(torch.int64)
    sizes = stops - torch.cat([stops.new_zeros(1), stops])[:-1]
    ends = torch.cumsum((sizes + block - 1) // block * block, 0)
    return Coded(codes, scales, format, codes.shape[-1] * (2 if fmt.packed else 1), ends)
