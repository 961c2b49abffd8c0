"""Launches along the tokens of each expert, for `kernels/fused.py`: dy on both axes, operands of wgrad."""

from dataclasses import replace

import torch
from torch import Tensor

from nybble.formats import table
from nybble.kernels.cuda import launch_both, launch_columns
from nybble.kernels.cuda import transposed as kernel
from nybble.kernels.cuda.column_source import TILE, Source, as_source
from nybble.kernels.cuda.jit import cdiv, use_asm
from nybble.kernels.cuda.launch_decode import row_decode_scales
from nybble.kernels.cuda.launch_rows import Draw
from nybble.kernels.cuda.launch_whole_columns import bound_columns


def token_tiles(offs: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """See `fused.token_tiles`."""
    ends = torch.empty_like(offs)
    return launch_columns.block_table(offs, tokens // TILE + offs.shape[0], TILE, 1, ends), ends


def gradient_both(
    dy: Tensor,
    format: str,
    index: Tensor | None,
    factor: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fused.gradient_both`; rows of no expert may hold anything."""
    fmt = table.get(format)
    return launch_both.launch_rows_and_columns(
        dy, fmt, torch.bfloat16, Draw(), 0, ends, index, factor, clear_tail=False, tiles=tiles
    )


def requantize_rows(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    index: Tensor | None,
    to_format: str,
    draw: Draw,
    offs: Tensor,
    tiles: Tensor | None,
) -> Tensor:
    """See `fused.requantize_rows`; rows of no expert may hold anything."""
    source = _codes_source(codes, scales, amax, format, index)
    (values,) = launch_columns.quantize_columns(
        source, table.get(to_format), source.shape[2], 0, None, offs, draw, dtype=torch.bfloat16,
        clear_tail=False, tiles=tiles,
    )  # fmt: skip
    return values[0]


def fp8_columns(
    x: Tensor,
    draw: Draw,
    offs: Tensor,
    index: Tensor | None,
    factor: Tensor | None,
    tiles: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `fused.fp8_columns`."""
    width = x.shape[1]
    source = as_source(x)
    rows = source.shape[1] if index is None else index.shape[0]
    source = replace(source, shape=(1, rows, source.shape[2]), index=index, factor=factor)
    codes, scales = launch_columns.quantize_columns(
        source, table.get("fp8-row"), width, 0, None, offs, draw, tiles=tiles
    )
    return codes[0, :width], scales[:, :width].contiguous()


def fp8_columns_of_codes(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    index: Tensor | None,
    draw: Draw,
    offs: Tensor,
    tiles: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `fused.fp8_columns_of_codes`."""
    zeros = torch.empty(offs.shape[0], codes.shape[1] * 2, dtype=torch.int32, device=codes.device)
    source = replace(_codes_source(codes, scales, amax, format, index, zeros), factor=factor)
    if tiles is None:
        tiles, _ = token_tiles(offs, source.shape[1])
    top = bound_columns(source, tiles)
    out, out_scales = launch_columns.quantize_columns(
        source, table.get("fp8-row"), source.shape[2], 0, top, offs, draw, tiles=tiles
    )
    return out[0], out_scales


def transpose_codes(codes: Tensor, offs: Tensor, index: Tensor | None, tiles: Tensor | None) -> Tensor:
    """See `fused.transpose_codes`."""
    C, R = codes.shape[1], codes.shape[0] if index is None else index.shape[0]
    blocks, warps = R // TILE + offs.shape[0], launch_columns.WARPS
    if tiles is None:
        tiles, _ = token_tiles(offs, R)
    out = torch.empty(C, blocks * TILE, dtype=torch.uint8, device=codes.device)
    kernel.transpose_codes[(cdiv(C, 64), cdiv(blocks, warps))](
        codes.view(torch.int64),
        out.view(torch.int32),
        *tiles[:2],
        index,
        C,
        blocks,
        HAS_INDEX=index is not None,
        W=warps,
        ASM=use_asm(codes.device),
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return out


def gradient_factors(
    codes: Tensor, scales: Tensor, order: Tensor | None, k: int, weights: Tensor | None
) -> Tensor:
    """See `fused.gradient_factors`."""
    R = codes.shape[0] if order is None else order.shape[0]
    out = torch.empty(R, dtype=torch.float32, device=codes.device)
    kernel.gradient_factors[(cdiv(R, 128),)](
        codes.view(torch.int32),
        scales,
        order,
        weights,
        out,
        R,
        codes.shape[1] // 4,
        k,
        HAS_ORDER=order is not None,
        HAS_WEIGHTS=weights is not None,
        N=128,
        CHUNK=16,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _codes_source(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    format: str,
    index: Tensor | None,
    zeros: Tensor | None = None,
) -> Source:
    """NVFP4 codes of rows, whose outer scale is one a row."""
    width = codes.shape[1] * 2
    return Source(
        shape=(1, codes.shape[0] if index is None else index.shape[0], width),
        codes=codes,
        scales=scales,
        s_dec=row_decode_scales(table.get(format), amax, "row", (codes.shape[0], width), None, zeros),
        index=index,
        zeros=zeros,
    )
