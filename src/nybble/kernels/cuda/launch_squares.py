"""Launches of `squares.py`."""

import torch
from torch import Tensor

from nybble.formats import blocks
from nybble.formats.table import Format
from nybble.kernels.cuda import squares as square_kernel
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import SCALES, Draw
from nybble.kernels.cuda.row_source import Rows, as_rows


def quantize_squares(
    x: Tensor, fmt: Format, amax: Tensor, draw: Draw, shape: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """(codes, scales) of x [lead, R, C] along its last axis, or (values,) of `dtype`, in the op's shapes."""
    lead, height, width = x.shape
    unit = 16 if fmt.packed else 32
    assert fmt.block_cols is not None
    rows = Rows(x=x, columns=width)
    align = 16 // x.element_size()
    strided = all(s % align == 0 for s in x.stride()[:-1]) and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    if width % unit or not strided or x.dtype == torch.float16:
        rows = as_rows(x.flatten(0, 1), unit)
        rows = Rows(x=rows.x.view(lead, height, -1), columns=width)
    padded = rows.x.shape[-1]
    codes = scales = values = None
    if dtype is None:
        codes = torch.empty(
            lead * height, padded // (2 if fmt.packed else 1), dtype=torch.uint8, device=x.device
        )
        shape_of_scales = blocks.scale_shape(fmt, list(shape))
        scales = torch.empty(shape_of_scales, dtype=blocks.scale_dtype(fmt), device=x.device)
    else:
        values = torch.empty(lead * height, padded, dtype=dtype, device=x.device)
    out_bf16 = dtype == torch.bfloat16
    across, warps = (8, 4) if fmt.block_cols == 16 else (1, 8)
    grid = (cdiv(padded, fmt.block_cols * across), cdiv(height, fmt.block_rows), lead)
    square_kernel.quantize_squares[grid](
        rows.pointer,
        None if codes is None else codes.view(torch.int32),
        scales,
        values.view(torch.int32) if values is not None and out_bf16 else values,
        amax,
        draw.key,
        draw.rows,
        rows.x.stride(1),
        rows.x.stride(0),
        height,
        width,
        padded,
        padded // unit,
        draw.tag,
        AMAX_STRIDE=int(amax.numel() > 1),
        E2M1=fmt.packed,
        ELEMENT_MAX=fmt.element_max,
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        OUTER=2 if fmt.two_level else 0,
        OUTER_MAX=fmt.outer_max or 0.0,
        STOCHASTIC=draw.stochastic,
        VALUES=values is not None,
        IN_BF16=rows.bf16,
        OUT_BF16=out_bf16,
        HAS_ROWS=draw.rows is not None,
        ALIGNED=width % 8 == 0,
        SQUARE=fmt.block_rows,
        BLOCK_UNITS=fmt.block_cols // unit,
        ACROSS=across,
        CHUNKS=unit // 8,
        ASM=use_asm(x.device),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    if values is not None:
        return (values[:, :width].contiguous().view(shape),)
    assert codes is not None
    assert scales is not None
    return codes[:, : blocks.code_shape(fmt, list(shape))[-1]].contiguous().view(
        blocks.code_shape(fmt, list(shape))
    ), scales
