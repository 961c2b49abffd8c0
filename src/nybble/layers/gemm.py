"""The products of a layer on values without their outer scale, which is multiplied in afterwards, in FP32.

Grouped products take rows sorted by expert and `offs`, the cumulative end of each expert's rows. They are
custom ops, so that a compiled graph does not look into the loop over experts; rows at or beyond offs[-1] give
zeros where they are not said to hold anything.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats.grouped import group_slices
from nybble.kernels import hopper, streamed
from nybble.kernels.blackwell import Coded, product, product_of_groups, product_of_rows
from nybble.kernels.cpu import product as tiled
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.direct import by_hand
from nybble.kernels.expert_rows import zero_behind
from nybble.kernels.fused import direct

FEW_ROWS = 32
"""Rows an expert, in the mean, up to which codes are multiplied as they are."""


def matmul(a: Any, b: Any, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a [M, C] @ b [C, N], times `scale` [M], [1] or [], in `dtype`; accumulated in FP32."""
    if isinstance(a, Coded):
        return scaled(product(a, b, dtype if scale is None else torch.float32), scale).to(dtype)
    if (
        a.device.type == "cuda"
        and a.dtype == torch.bfloat16
        and (scale is not None or dtype == torch.float32)
    ):
        y = torch.mm(a, b, out_dtype=torch.float32)
    elif by_hand(a) and by_hand(b):
        y = tiled.matmul(a, b, fresh(a.shape[0], b.shape[1]))
    else:
        y = torch.mm(a, b)
    return scaled(y, scale).to(dtype)


def scaled(y: Tensor, scale: Tensor | None) -> Tensor:
    """y [M, N], which is overwritten if it is FP32, times `scale` [M], [1] or []."""
    if scale is None:
        return y
    return y.float().mul_(scale.unsqueeze(-1) if scale.dim() == 1 else scale)


def grouped_rows(a: Any, w: Any, offs: Tensor, transpose: bool, clear: bool = True) -> Tensor:
    """The op below, or the native product of codes."""
    if isinstance(a, Coded):
        return product_of_rows(a, w, offs)
    if isinstance(a, hopper.RowScaled):
        out = hopper.product_of_rows(a, w, offs)
        return zero_behind(out, offs) if clear else out
    if direct(a) and a.dtype == torch.bfloat16 and not clear:
        return streamed.rows_times(a, w, offs, transpose)
    return _grouped_rows(a, w, offs, transpose, clear)


def few_rows(a: Tensor, experts: int) -> bool:
    """Whether the rows of a product with experts are so few that a GPU had better multiply codes, where codes
    are what it holds. Not inside a mode that looks at ops, such as the batch-invariant one."""
    return direct(a) and a.dtype == torch.bfloat16 and a.shape[0] <= FEW_ROWS * experts


def rows_times_codes(a: Tensor, codes: Tensor, scales: Tensor, offs: Tensor) -> Tensor:
    """`grouped_rows` with the transposed matrices that NVFP4 codes [E, N, C / 2] and scales stand for."""
    from nybble.kernels.cuda import coded_rows

    return coded_rows.rows_times_codes(a, codes, scales, offs)


def grouped_columns(a: Any, b: Any, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """The op below, or the native product of codes."""
    if isinstance(a, Coded):
        return product_of_groups(a, b).to(dtype)
    if isinstance(a, hopper.RowScaled):
        return hopper.product_of_groups(a, b, dtype)
    if direct(a) and a.dtype == torch.bfloat16:
        return F.grouped_mm(a.t(), b, offs=offs).to(dtype)
    return _grouped_columns(a, b, offs, dtype)


@torch.library.custom_op("nybble::grouped_rows", mutates_args=())
def _grouped_rows(a: Tensor, w: Tensor, offs: Tensor, transpose: bool, clear: bool) -> Tensor:
    """Each expert's rows of a [R, C] times its own matrix.

    w is [E, N, C] with `transpose` (a @ w[e].T, fprop) and [E, C, N] without (a @ w[e], dgrad). Returns [R,
    N]; without `clear` rows at or beyond offs[-1] may hold anything.
    """
    if a.device.type == "cuda" and a.dtype == torch.bfloat16:
        out = streamed.rows_times(a, w, offs, transpose)
        if not clear:
            return out
        return out.masked_fill_(torch.arange(a.shape[0], device=a.device)[:, None] >= offs[-1], 0)
    w = w.transpose(-2, -1) if transpose else w
    if a.device.type == "cpu" and a.dtype == torch.float32:
        out = fresh(a.shape[0], w.shape[-1])
        tiled.grouped_rows(a, w.transpose(-2, -1) if transpose else w, offs, transpose, out)
    else:
        out = a.new_empty(a.shape[0], w.shape[-1])
        for e, part in enumerate(group_slices(offs)):
            torch.mm(a[part], w[e], out=out[part])
    out[int(offs[-1]) if len(offs) else 0 :].zero_()
    return out


@torch.library.custom_op("nybble::grouped_columns", mutates_args=())
def _grouped_columns(a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """a [R, N].T @ b [R, K] over each expert's rows alone (wgrad): [E, N, K] in `dtype`, zeros for an empty
    expert."""
    if a.device.type == "cuda" and a.dtype == torch.bfloat16:
        return F.grouped_mm(a.t(), b, offs=offs).to(dtype)
    if a.device.type == "cpu" and a.dtype == torch.float32:
        out = fresh(offs.shape[0], a.shape[1], b.shape[1])
        tiled.grouped_columns(a, b, offs, False, out)
    else:
        out = a.new_empty(offs.shape[0], a.shape[1], b.shape[1])
        for e, part in enumerate(group_slices(offs)):
            torch.mm(a[part].t(), b[part], out=out[e])  # no rows give zeros
    return out.to(dtype) if out.dtype != dtype else out


@_grouped_rows.register_fake
def _(a, w, offs, transpose, _clear):  # type: ignore[no-untyped-def]  # the op's own
    assert offs.dim() == 1
    return a.new_empty(a.shape[0], w.shape[-2] if transpose else w.shape[-1])


@_grouped_columns.register_fake
def _(a, b, offs, dtype):  # type: ignore[no-untyped-def]  # the op's own
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1], dtype=dtype)
