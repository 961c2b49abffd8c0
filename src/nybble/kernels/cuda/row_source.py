"""What the row kernels read, described for a launch: rows of values, or of gate and up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.formats.table import Format
from nybble.kernels.cuda.jit import cdiv


@dataclass(frozen=True, kw_only=True)
class Rows:
    """x as rows that the kernels can read: 16-byte aligned, padded with zeros to whole units."""

    x: Tensor
    """[R, C] with unit stride along C, BF16 or FP32."""
    columns: int
    """Of the logical tensor."""

    @property
    def bf16(self) -> bool:
        """Read as pairs."""
        return self.x.dtype == torch.bfloat16

    @property
    def pointer(self) -> Tensor:
        """What the kernel gets."""
        return self.x.view(torch.int32) if self.bf16 else self.x


@dataclass(frozen=True, kw_only=True)
class Gated:
    """How gate and up become what is quantised."""

    gate_cap: float
    """Caps of the soft-capped SwiGLU; 0 for the plain one."""
    up_cap: float
    factor: Tensor | None
    """FP32 [R], what each row of gate and up is multiplied by before it is rounded to BF16."""


def unit_of(fmt: Format) -> int:
    """Elements that a thread takes: 8 are a dense access, a whole block saves its scale's arithmetic."""
    return 16 if fmt.scale == "e4m3" else 8


def as_matrix(x: Tensor) -> Tensor:
    """[R, C], leading axes joined, one row for a vector."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def as_rows(x: Tensor, unit: int) -> Rows:
    """x [R, C], copied only where its layout or its last columns need it."""
    if x.dtype == torch.float16:
        x = x.to(torch.float32)
    columns = x.shape[-1]
    align = 16 // x.element_size()
    padded = cdiv(columns, unit) * unit
    fits = columns == padded and x.stride(-1) == 1 and x.stride(0) % align == 0 and x.data_ptr() % 16 == 0
    if not fits:
        copy = x.new_zeros(x.shape[0], padded)
        copy[:, :columns] = x
        x = copy
    return Rows(x=x, columns=columns)


def long_rows(x: Tensor, count: int, unit: int) -> Tensor | None:
    """x as [count, numel / count] where that changes no block and no draw."""
    return x.reshape(count, -1) if x.is_contiguous() and x.shape[-1] % unit == 0 and x.numel() else None
