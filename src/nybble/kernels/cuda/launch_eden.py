"""Launches of `eden.py`: matrices brought to runs of 128 along the quantised axis."""

import torch
from torch import Tensor

from nybble.formats import eden, grouped
from nybble.formats.table import Format
from nybble.kernels.cuda import eden as kernel
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import Draw

N = 32
"""Neighbours across the axis of a program."""
WARPS = 8
BLOCK = 16
BLOCKS = eden.RUN // BLOCK


def quantize_runs(
    x: Tensor,
    fmt: Format,
    axis: int,
    outer: str,
    amax: Tensor,
    group: Tensor | None,
    draw: Draw,
    offs: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Codes [stored rows, L / 2] and scales, or values [lead, R, C] in `dtype`, of x [lead, R, C].

    Args:
        amax: the outer ones, as stored.
        group: int32, which of them each row has, where outer is "matrix" and the axis -1.
    """
    lead, height, width = x.shape
    x = x.to(torch.float32).contiguous()
    source = None
    if axis == -1:
        leads, across, length, strides = 1, lead * height, width, (0, 1, width)
    else:
        leads, across, length, strides = lead, width, height, (height * width, width, 1)
    if offs is not None and axis == -2:
        where = grouped.packing(fmt, offs, height)
        length = where.size
        source = offs.new_full((cdiv(length + 1, eden.RUN) * eden.RUN,), -1, dtype=torch.int64)
        source[where.column] = torch.arange(height, device=x.device)
        source[length:] = -1  # where the rows of no group went
        if outer == "matrix":
            group = where.group[::BLOCK].clamp(max=offs.shape[0] - 1).to(torch.int32)
            group = torch.nn.functional.pad(group, (0, -len(group) % BLOCKS))
    runs = cdiv(length, eden.RUN)
    per_across, per_lead = outer == "row", outer == "matrix" and group is None
    codes = scales = values = None
    if dtype is None:
        codes = torch.empty(leads * across, runs * eden.RUN // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(leads * across, runs * BLOCKS, dtype=torch.uint8, device=x.device)
    else:
        values = torch.empty_like(x, dtype=dtype) if source is None else torch.zeros_like(x, dtype=dtype)
    bf16 = dtype == torch.bfloat16
    kernel.eden_runs[(cdiv(across, N) * runs * leads,)](
        x,
        source,
        amax.contiguous(),
        group,
        draw.key,
        draw.rows,
        offs,
        None if codes is None else codes.view(torch.int32),
        scales,
        values.view(torch.int16) if values is not None and bf16 else values,
        runs,
        length,
        across,
        width,
        height,
        0 if offs is None else offs.shape[0],
        draw.tag,
        *strides,
        across if per_across else int(per_lead),
        int(per_across),
        SHARE=eden.SHARE,
        OUTER_MAX=fmt.outer_max,
        ALONG_ROWS=axis == -1,
        HAS_SOURCE=source is not None,
        GROUP_ACROSS=group is not None and axis == -1,
        GROUP_BLOCK=group is not None and axis == -2,
        HAS_ROWS=draw.rows is not None,
        HAS_OFFS=offs is not None and axis == -1,
        CODES=codes is not None,
        VALUES=values is not None,
        OUT_BF16=bf16,
        N=N,
        ASM=use_asm(x.device),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    if values is not None:
        return (values,)
    assert codes is not None
    assert scales is not None
    return codes[:, : cdiv(length, 2)].contiguous(), scales[:, : cdiv(length, BLOCK)].contiguous()
