"""`nybble::fake_quantize_both`: a gradient quantised along both axes, in one read where a kernel can."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nybble.formats import checks, ops
from nybble.formats.table import Format, get
from nybble.kernels.direct import Op

if TYPE_CHECKING:
    from nybble.kernels.cuda.launch_rows import Draw


@torch.library.custom_op("nybble::fake_quantize_both", mutates_args=())
def _fake_quantize_both(
    x: Tensor,
    format: str,
    dtype: torch.dtype,
    rounding: str = "nearest",
    key: Tensor | None = None,
    layer: int = 0,
    operand_rows: int = 0,
    operand_columns: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Values of x [T, C] quantised along -1 and along -2, as two calls of fake_quantize give them.

    Args:
        x, format, dtype, rounding, key, layer, rows, offs: as for `nybble::fake_quantize`.
        operand_rows, operand_columns: the operand that names the draws of each of the two.
    Returns:
        (values along -1, values along -2), both [T, C] of `dtype`.
    """
    return twice(x, format, dtype, rounding, key, layer, operand_rows, operand_columns, rows, offs)


def twice(
    x: Tensor,
    format: str,
    dtype: torch.dtype,
    rounding: str = "nearest",
    key: Tensor | None = None,
    layer: int = 0,
    operand_rows: int = 0,
    operand_columns: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by two reads, on any device."""
    first, _ = ops.fake_quantize(
        x, format, dtype, -1, rounding, "tensor", key, layer, operand_rows, rows, offs
    )
    second, _ = ops.fake_quantize(
        x, format, dtype, -2, rounding, "tensor", key, layer, operand_columns, rows, offs
    )
    return first, second


fake_quantize_both = Op(_fake_quantize_both)


@fake_quantize_both.register_fake
def _(
    x: Tensor,
    format: str,
    dtype: torch.dtype,
    rounding: str = "nearest",
    key: Tensor | None = None,
    layer: int = 0,
    operand_rows: int = 0,
    operand_columns: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    checks.check_quantize(x, format, -1, rounding, "tensor", key, layer, operand_rows, rows, offs)
    checks.check_quantize(x, format, -2, rounding, "tensor", key, layer, operand_columns, rows, offs)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def reason(x: Tensor, format: str, dtype: torch.dtype, offs: Tensor | None) -> str | None:
    """Why one read does not serve; None if it does."""
    from nybble.kernels.cuda.launch_columns import too_many

    fmt = get(format)
    if fmt.scale != "e8m0" or fmt.packed:
        return f"{fmt.name} has no kernel that quantises along both axes"
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] % 8 or (offs is not None and offs.numel() == 0):
        return "the shape does not fit"
    if dtype not in (torch.bfloat16, torch.float32):
        return "values are written as bfloat16 or float32"
    return too_many(1, x.shape[0], 32, 0 if offs is None else offs.shape[0])


def launch(
    x: Tensor,
    format: str,
    dtype: torch.dtype,
    rounding: str = "nearest",
    key: Tensor | None = None,
    layer: int = 0,
    operand_rows: int = 0,
    operand_columns: int = 0,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fake_quantize_both`; on tensors of one GPU."""
    fmt = checks.check_quantize(x, format, -1, rounding, "tensor", key, layer, operand_rows, rows, offs)
    checks.check_quantize(x, format, -2, rounding, "tensor", key, layer, operand_columns, rows, offs)
    if reason(x, format, dtype, offs) is not None:
        return twice(x, format, dtype, rounding, key, layer, operand_rows, operand_columns, rows, offs)
    from nybble.kernels.cuda.launch_rows import Draw

    return launch_rows_and_columns(
        x.detach(), fmt, dtype, Draw.of(rounding, key, layer, operand_rows, rows), operand_columns, offs
    )


def launch_rows_and_columns(
    x: Tensor,
    fmt: Format,
    dtype: torch.dtype,
    draw: "Draw",
    operand_columns: int,
    offs: Tensor | None,
    index: Tensor | None = None,
    factor: Tensor | None = None,
    clear_tail: bool = True,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Values of rows along -1 and along -2, of a shape that `reason` does not refuse.

    Args:
        x: [T, C]; with `index` (int32 [R]) row r of the results comes from row index[r].
        draw: of the form along the features; the other one draws as `operand_columns`.
        factor: FP32 [R], what rows are multiplied by (and rounded to the dtype of x) in the form along the
            tokens alone.
        clear_tail: rows of no group are zero; else they may hold anything.
        tiles: the `block_table` of `offs`, where it is known.
    """
    from nybble.kernels.cuda import both as kernel
    from nybble.kernels.cuda import launch_columns as by_columns
    from nybble.kernels.cuda import launch_decode
    from nybble.kernels.cuda.column_source import as_source
    from nybble.kernels.cuda.jit import cdiv, use_asm
    from nybble.kernels.cuda.launch_rows import SCALES

    source = as_source(x)
    assert source.x is not None
    _, tokens, width = source.shape
    tokens = tokens if index is None else index.shape[0]
    blocks = cdiv(tokens, 32) if offs is None else tokens // 32 + offs.shape[0]
    table = tiles
    if offs is not None and tiles is None:
        table = by_columns.block_table(offs, blocks, 32)
    first, second = (torch.empty(tokens, width, dtype=dtype, device=x.device) for _ in range(2))
    bf16, warps = dtype == torch.bfloat16, by_columns.WARPS
    if offs is not None and clear_tail:
        launch_decode.zero_tail(first, offs)
        launch_decode.zero_tail(second, offs)
    kernel.fake_quantize_both[(cdiv(width, 64), cdiv(blocks, warps))](
        source.pointer,
        first.view(torch.int32) if bf16 else first,
        second.view(torch.int32) if bf16 else second,
        draw.key,
        draw.rows,
        *((None,) * 2 if table is None else table[:2]),
        index,
        factor,
        source.x.stride(1),
        width,
        tokens,
        blocks,
        draw.tag,
        (draw.layer << 8) | operand_columns,
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        STOCHASTIC=draw.stochastic,
        SOURCE=source.kind,
        OUT_BF16=bf16,
        HAS_ROWS=draw.rows is not None,
        HAS_INDEX=index is not None,
        HAS_FACTOR=factor is not None,
        GROUPED=offs is not None,
        W=warps,
        ASM=use_asm(x.device),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return first, second
