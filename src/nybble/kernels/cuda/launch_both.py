"""`nybble::fake_quantize_both`: a gradient quantised along both axes, in one read where a kernel can."""

import torch
from torch import Tensor

from nybble.formats import checks, ops
from nybble.formats.table import get

OP = "nybble::fake_quantize_both"


@torch.library.custom_op(OP, mutates_args=())
def fake_quantize_both(
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
    from nybble.kernels.cuda import both as kernel
    from nybble.kernels.cuda import launch_columns as by_columns
    from nybble.kernels.cuda.jit import cdiv, use_asm, whole_key
    from nybble.kernels.cuda.launch_rows import SCALES

    source = by_columns.as_source(x.detach())
    assert source.x is not None
    _, tokens, width = source.shape
    blocks = cdiv(tokens, 32) if offs is None else tokens // 32 + offs.shape[0]
    table = None if offs is None else by_columns.block_table(offs, blocks, 32)
    first, second = (torch.empty(tokens, width, dtype=dtype, device=x.device) for _ in range(2))
    bf16, stochastic, warps = dtype == torch.bfloat16, rounding == "stochastic", by_columns.WARPS
    if offs is not None:
        by_columns.zero_tail(first, offs)
        by_columns.zero_tail(second, offs)
    kernel.fake_quantize_both[(cdiv(width, 64), cdiv(blocks, warps))](
        source.pointer,
        first.view(torch.int32) if bf16 else first,
        second.view(torch.int32) if bf16 else second,
        None if key is None else whole_key(key),
        None if rows is None else rows.to(torch.int64).contiguous(),
        None if table is None else table.start,
        None if table is None else table.count,
        source.x.stride(1),
        width,
        tokens,
        blocks,
        (layer << 8) | operand_rows,
        (layer << 8) | operand_columns,
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        STOCHASTIC=stochastic,
        SOURCE=source.kind,
        OUT_BF16=bf16,
        HAS_ROWS=rows is not None and stochastic,
        GROUPED=offs is not None,
        W=warps,
        ASM=use_asm(x.device),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return first, second
