"""Launches of `decode.py`: codes to values, outer scales of rows, and zeros behind the last token group."""

import math

import torch
from torch import Tensor

from nybble.formats.table import Format
from nybble.kernels.cuda import decode as kernel
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import SCALES, pow2, row_groups

LANES = 256
"""Words of eight elements of a program whose rows are narrow."""
TAIL_ROWS, TAIL_PROGRAMS = 4, 256


def decode_rows(
    codes: Tensor, scales: Tensor, s_dec: Tensor | None, out: Tensor, index: Tensor | None, fmt: Format
) -> None:
    """Fill `out` [R, L], BF16 or FP32, with the values of rows of codes (int32 words), times S_dec if given.

    Args:
        s_dec: FP32, one or one a row of codes.
        index: int32 [R], the row of the codes that each row of `out` is.
    """
    rows, words = out.shape[0], out.shape[1] // 8
    if rows == 0 or words == 0:
        return
    bf16 = out.dtype == torch.bfloat16
    block_words = words if fmt.block_cols is None else fmt.block_cols // 8
    n = min(512, pow2(words))
    tall = max(1, LANES // n)
    kernel.decode_rows[(cdiv(rows, tall) * (1 if tall > 1 else cdiv(words, n)),)](
        codes,
        scales,
        s_dec,
        out.view(torch.int32) if bf16 else out,
        index,
        rows,
        words,
        block_words,
        cdiv(words, block_words),
        E2M1=fmt.packed,
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        SCALE_ROWS=fmt.block_rows,
        SDEC=0 if s_dec is None else (1 if s_dec.numel() == 1 else 2),
        HAS_INDEX=index is not None,
        OUT_BF16=bf16,
        BR=tall,
        N=n,
        ASM=use_asm(out.device),
        num_warps=4,
        enable_fp_fusion=False,
    )


def zero_tail(values: Tensor, offs: Tensor) -> None:
    """Zero the rows of values [..., T, C] that belong to no group."""
    tokens, width = values.shape[-2:]
    n = min(1024, pow2(width))
    if tokens and width:
        programs = min(cdiv(tokens, TAIL_ROWS), TAIL_PROGRAMS)
        steps = pow2(cdiv(tokens, programs * TAIL_ROWS))  # so that few kernels are compiled
        kernel.zero_tail[(programs, cdiv(width, n))](
            values, offs, tokens, width, offs.shape[0], STEPS=steps, BR=TAIL_ROWS, N=n, enable_fp_fusion=True
        )


def row_decode_scales(
    fmt: Format,
    amax: Tensor,
    outer: str,
    shape: tuple[int, ...],
    offs: Tensor | None,
    zeros: Tensor | None = None,
) -> Tensor:
    """S_dec as the kernels read it: one, or one for each row of a stored `shape` [..., R, L].

    The same launch fills `zeros` (int32) with zeros.
    """
    count = math.prod(shape[:-1])
    group = row_groups(offs, count) if outer == "matrix" and offs is not None else None
    each = 1  # rows that share an amax
    if outer == "matrix" and offs is None and len(shape) > 2 and shape[0] > 1:
        each = shape[-2]
    rows = count if outer == "row" or group is not None or each > 1 else 1
    out = torch.empty(rows, dtype=torch.float32, device=amax.device)
    cleared = 0 if zeros is None else zeros.numel()
    if rows and fmt.outer_max is not None:
        kernel.row_decode_scales[(cdiv(max(rows, cleared), 256),)](
            amax.contiguous().view(-1),
            group,
            out,
            zeros,
            rows,
            each,
            cleared,
            OUTER_MAX=fmt.outer_max,
            HAS_GROUP=group is not None,
            N=256,
            enable_fp_fusion=True,
        )
    return out
