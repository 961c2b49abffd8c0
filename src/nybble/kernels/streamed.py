"""Products of rows of experts on Hopper whose matrices stay in shared memory while rows stream past them.

What binds them where few features are contracted is the L2 cache: `cuda/bf16_rows.py` reads less of it than
torch's product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels import hopper

SHORT = 512
"""Features that are contracted at most."""
CHUNK = 64
"""Features that they are a multiple of."""
MANY = 64
"""Rows an expert, in the mean, from which on there are enough."""


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
