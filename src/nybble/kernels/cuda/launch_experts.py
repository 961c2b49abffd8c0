"""Launches for the passes of `kernels/fused.py`; shapes that no kernel serves run the specification."""

import torch
from torch import Tensor

from nybble.formats import blocks, table
from nybble.kernels.cuda import expert_passes as kernel
from nybble.kernels.cuda import gather as gather_kernel
from nybble.kernels.cuda import groups as group_kernel
from nybble.kernels.cuda import launch_decode, launch_rows
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_rows import Draw, pow2
from nybble.kernels.cuda.row_source import Gated, Rows

ROW_LIMIT = 1 << 16
"""Features of a row that one program goes through."""


def bf16_rows(*tensors: Tensor) -> bool:
    """Whether all are BF16 matrices that the kernels read as they are, 16 bytes at a time."""
    return all(
        t.dtype == torch.bfloat16
        and t.dim() == 2
        and t.is_contiguous()
        and t.shape[1] % 8 == 0
        and t.numel() > 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def holds_rows(format: str, width: int, rounding: str = "nearest") -> bool:
    """Whether a program quantises a whole row of NVFP4 at once."""
    fmt = table.get(format)
    return (
        rounding != "eden"
        and fmt.scale == "e4m3"
        and not fmt.square
        and not fmt.outer_pow2
        and width % 16 == 0
        and pow2(width) <= ROW_LIMIT
    )


def as_pairs(t: Tensor) -> Tensor:
    """BF16 as the kernels get it."""
    return t.view(torch.int32)


LANES = 256
"""Of one program: two a thread of four warps, 16 bytes each."""


def _tile(units: int) -> tuple[int, int]:
    """(rows, units of a row) of a program."""
    n = min(LANES, pow2(units))
    return LANES // n, n


def row_facts(order: Tensor, k: int, rows: Tensor | None, pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.row_facts`."""
    R = order.shape[0]
    token, place = torch.empty_like(order), torch.empty_like(order)
    counted = torch.empty(R if pairs else 0, dtype=torch.int64, device=order.device)
    rows = None if rows is None else rows.contiguous()
    group_kernel.row_facts[(cdiv(R, 256),)](
        order,
        rows,
        token,
        place,
        counted,
        R,
        k,
        PAIRS=pairs,
        HAS_ROWS=rows is not None,
        N=256,
        enable_fp_fusion=True,
    )
    return token, place, counted


def row_factors(
    order: Tensor,
    ends: Tensor,
    k: int,
    amax: Tensor | None,
    format: str,
    per: str,
    w_amax: Tensor | None,
    w_format: str,
    weights: Tensor | None,
) -> Tensor:
    """See `fused.row_factors`."""
    R = order.shape[0]
    out = torch.empty(R, dtype=torch.float32, device=order.device)
    kernel.row_factors[(cdiv(R, 256),)](
        order,
        ends,
        amax,
        w_amax,
        weights,
        out,
        R,
        ends.shape[0],
        k,
        A_MAX=0.0 if amax is None else table.get(format).outer_max,
        W_MAX=0.0 if w_amax is None else table.get(w_format).outer_max,
        A=0 if amax is None else {"one": 1, "token": 2, "row": 3}[per],
        W=0 if w_amax is None else 1 + int(w_amax.numel() > 1),
        WEIGHTS=weights is not None,
        N=256,
        G=pow2(ends.shape[0]),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def gather_rows(x: Tensor, index: Tensor, factor: Tensor | None) -> Tensor:
    """See `fused.gather_rows`."""
    out = x.new_empty(index.shape[0], x.shape[1])
    rows, n = _tile(x.shape[1] // 8)
    gather_kernel.gather_rows[(cdiv(out.shape[0], rows), cdiv(x.shape[1] // 8, n))](
        as_pairs(x),
        index,
        factor,
        as_pairs(out),
        out.shape[0],
        x.shape[1] // 8,
        HAS_FACTOR=factor is not None,
        BR=rows,
        N=n,
        ASM=use_asm(x.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def combine_rows(x: Tensor, factor: Tensor | None, place: Tensor, ends: Tensor, k: int) -> Tensor:
    """See `fused.combine_rows`."""
    y = x.new_empty(place.shape[0] // k, x.shape[1])
    rows, n = _tile(x.shape[1] // 8)
    kernel.combine_rows[(cdiv(y.shape[0], rows), cdiv(x.shape[1] // 8, n))](
        as_pairs(x),
        factor,
        place,
        ends,
        as_pairs(y),
        y.shape[0],
        x.shape[1] // 8,
        ends.shape[0],
        k,
        HAS_FACTOR=factor is not None,
        BR=rows,
        N=n,
        ASM=use_asm(x.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


def swiglu_rows(
    gate_up: Tensor, factor: Tensor | None, ends: Tensor, gate_cap: float, up_cap: float
) -> Tensor:
    """See `fused.swiglu_rows`."""
    R, width = gate_up.shape[0], gate_up.shape[1] // 2
    h = gate_up.new_empty(R, width)
    rows, n = _tile(width // 8)
    kernel.swiglu_rows[(cdiv(R, rows), cdiv(width // 8, n))](
        as_pairs(gate_up),
        as_pairs(h),
        factor,
        ends,
        R,
        width // 8,
        ends.shape[0],
        GATE_CAP=gate_cap,
        UP_CAP=up_cap,
        HAS_FACTOR=factor is not None,
        BR=rows,
        N=n,
        ASM=use_asm(h.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return h


def quantize_tokens(
    x: Tensor, format: str, draw: Draw, gated: Gated | None, offs: Tensor | None, place: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, amax, BF16 values) along the features, outer scale one a row; values at `place`."""
    fmt, R = table.get(format), x.shape[0]
    width = x.shape[1] // (2 if gated else 1)
    shape = [R, width]
    codes = torch.empty(blocks.code_shape(fmt, shape), dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks.scale_shape(fmt, shape), dtype=blocks.scale_dtype(fmt), device=x.device)
    amax = torch.empty(blocks.amax_shape(fmt, shape, -1, "row", None), dtype=torch.float32, device=x.device)
    rows = R if place is None else place.shape[0]
    values = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    launch_rows.quantize_rows(
        Rows(x=x, columns=x.shape[1]), fmt, int(fmt.two_level), amax, None, offs, draw,
        codes=codes, scales=scales, values=values, gated=gated, place=place,
    )  # fmt: skip
    return codes, scales, amax, values


def decode_to_rows(codes: Tensor, scales: Tensor, format: str, index: Tensor) -> Tensor:
    """See `fused.decode_to_rows`."""
    fmt = table.get(format)
    length = codes.shape[1] * (2 if fmt.packed else 1)
    out = torch.empty(index.shape[0], length, dtype=torch.bfloat16, device=codes.device)
    launch_decode.decode_rows(codes.view(torch.int32), scales, None, out, index, fmt)
    return out
