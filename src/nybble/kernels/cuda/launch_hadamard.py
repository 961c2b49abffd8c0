"""The Hadamard transform of a CUDA tensor, brought to its kernel."""

import math
from functools import cache

import torch
from torch import Tensor

from nybble.formats import grouped
from nybble.formats import hadamard as spec
from nybble.kernels.cuda import transform as kernel
from nybble.kernels.cuda.jit import cdiv

TILE = 2048
"""Elements of a program: a run and as many neighbours as that leaves."""


@cache
def _fixed_signs(size: int, device: torch.device) -> Tensor:
    """Kept, since they are made in six launches."""
    return spec.signs(size, device, None, 0, 0)


def transform(
    x: Tensor,
    axis: int,
    size: int,
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    offs: Tensor | None = None,
) -> Tensor:
    """See `hadamard.transform` of the specification."""
    spec.check_transform(x, axis, size, key, layer, operand, offs)
    groups = None if offs is None else offs.shape[0]
    shape = spec.transformed_shape(x.shape, axis, size, groups)
    if x.numel() == 0 or groups == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    x = x.detach().contiguous()
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    length, padded = x.shape[axis], shape[axis]
    if axis == -1:
        leads, across = 1, x.numel() // length
        x_strides, y_strides = (0, 1, length), (0, 1, padded)
    else:
        leads, across = math.prod(x.shape[:-2]), x.shape[-1]
        x_strides, y_strides = (length * across, across, 1), (padded * across, across, 1)
    source = None
    if offs is not None:
        where = grouped.pack_blocks(size, offs, length)
        source = offs.new_full((where.size + 1,), -1, dtype=torch.int64)
        source[where.column] = torch.arange(length, device=offs.device)  # rows of none go behind the end
    n, bf16 = TILE // size, x.dtype == torch.bfloat16
    runs = padded // size
    kernel.transform_runs[(runs * leads, cdiv(across, n))](
        x.view(torch.int16) if bf16 else x,
        _fixed_signs(size, x.device) if key is None else spec.signs(size, x.device, key, layer, operand),
        source,
        y,
        runs,
        length,
        across,
        *x_strides,
        *y_strides,
        HAS_SOURCE=source is not None,
        BF16=bf16,
        FACTOR=spec.factor(size),
        SIZE=size,
        N=n,
        enable_fp_fusion=False,
    )
    return y
