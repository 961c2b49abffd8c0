"""Products of rows of experts on Hopper whose matrices stay in shared memory while rows stream past them.

What binds them where few features are contracted is the L2 cache: `cuda/bf16_rows.py` reads less of it than
torch's product; `cuda/nvfp4_rows.py` reads rows as NVFP4 codes, wherever they lie, and decodes them itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels import hopper
from nybble.kernels.fused import direct

SHORT = 512
"""Features that are contracted at most."""
CHUNK = 64
"""Features that they are a multiple of."""
MANY = 64
"""Rows an expert, in the mean, from which on there are enough."""


@dataclass(frozen=True, eq=False)
class CodedRows:
    """Rows in NVFP4 codes, without their outer scale: they stand where their values [R, C] would."""

    codes: Tensor
    """uint8 [T, C / 2]."""
    scales: Tensor
    """E4M3 bytes [T, C / 16]."""
    index: Tensor | None = None
    """int32 [R]: which row of the codes each row is; its own where None."""

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        rows = self.codes if self.index is None else self.index
        return torch.Size((rows.shape[0], 2 * self.codes.shape[1]))


def takes_codes(like: Tensor, rows: int, experts: int, outputs: int, features: int) -> bool:
    """Whether codes of rows [R, C] are multiplied as they are with matrices [E, N, C]; of an op on `like`."""
    return direct(like) and _fits(like.device, rows, experts, outputs, features)


def codes_times(a: CodedRows, w: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows times its matrix of BF16 w [E, N, C] transposed: BF16 [R, N], of what `takes_codes`.

    Rows at or beyond offs[-1] may hold anything.
    """
    from nybble.kernels.cuda import launch_bf16

    with torch.cuda.device(w.device):
        return launch_bf16.product_of_codes(a.codes, a.scales, a.index, w, offs)


def rows_times(a: Tensor, w: Tensor, offs: Tensor, transpose: bool) -> Tensor:
    """Each expert's rows of BF16 a [R, C] on a GPU times its matrix: BF16 [R, N].

    w is [E, N, C] with `transpose`, else [E, C, N]. Rows at or beyond offs[-1] may hold anything.
    """
    outputs = w.shape[1] if transpose else w.shape[2]
    aligned = a.data_ptr() % hopper.ALIGN == 0 and w.data_ptr() % hopper.ALIGN == 0
    if aligned and _fits(a.device, a.shape[0], w.shape[0], outputs, a.shape[1]):
        from nybble.kernels.cuda import launch_bf16

        with torch.cuda.device(a.device):
            return launch_bf16.product_of_rows(a, w, offs, transpose)
    return F.grouped_mm(a, w.transpose(-2, -1) if transpose else w, offs=offs)


def _fits(device: torch.device, rows: int, experts: int, outputs: int, features: int) -> bool:
    if not 0 < features <= SHORT or features % CHUNK or outputs % 8 or not outputs:
        return False
    return experts > 0 and MANY * experts <= rows < hopper.LONGEST and hopper.own_kernels(device)
