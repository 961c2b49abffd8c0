"""Launches that make messages of rows and rows of messages; see `kernels/messages.py` for their layout."""

import torch
from torch import Tensor

from nybble.formats import blocks, checks
from nybble.formats.table import Format
from nybble.kernels.cuda import launch_rows as by_rows
from nybble.kernels.cuda import messages as kernel
from nybble.kernels.cuda import reasons, row_source
from nybble.kernels.cuda import rows as row_kernel
from nybble.kernels.cuda.jit import cdiv, use_asm

WORDS, ROW_WORDS, UNITS = 256, 128, 512
"""Of a program: words of eight elements to unpack, where tiles go on from row to row and where not; units to
copy. Measured on an H200 with rows of 4608."""


def can_pack(x: Tensor, fmt: Format) -> bool:
    """Whether rows of x go into a message in one pass: whole blocks, every row at a multiple of 8 bytes."""
    return can_unpack(x, fmt, x.shape[1])


def can_unpack(message: Tensor, fmt: Format, columns: int) -> bool:
    """Whether a message of rows of `columns` values is read in one pass."""
    if message.shape[0] == 0 or columns == 0 or reasons.device(message.device) is not None:
        return False
    block = fmt.block_cols or 1
    scale_bytes = columns // block
    code_bytes = columns // 2 if fmt.packed else columns
    unit_bytes = 4 if fmt.packed else 8
    return (
        fmt.scale in ("e4m3", "e8m0")
        and not fmt.square
        and not fmt.four_over_six
        and columns % max(block, 16) == 0
        and (code_bytes + scale_bytes) % unit_bytes == 0
    )


def pack(
    x: Tensor,
    fmt: Format,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
) -> Tensor:
    """See `kernels.messages.pack`."""
    outer = "row" if fmt.two_level else "tensor"
    checks.check_quantize(x, fmt.name, -1, rounding, outer, key, layer, operand, rows, None)
    draw = by_rows.Draw.of(rounding, key, layer, operand, rows)
    count, columns = x.shape
    codes, scales, total = _layout(fmt, columns)
    message = torch.empty(count, total, dtype=torch.uint8, device=x.device)
    amax = x.new_empty(0, dtype=torch.float32)
    if fmt.two_level:
        message[:, scales + 4 :].zero_()
        amax = message.view(torch.float32)[:, scales // 4 :]
    unit = row_source.unit_of(fmt)
    by_rows.quantize_rows(
        row_source.as_rows(x.detach(), unit),
        fmt,
        row_kernel.OUTER_ROW.value if fmt.two_level else row_kernel.OUTER_NONE.value,
        amax,
        None,
        None,
        draw,
        codes=message,
        scales=message[:, codes:],
        strides=(total // (unit // 2 if fmt.packed else unit), total, total // 4),
    )
    return message


def unpack(message: Tensor, fmt: Format, columns: int, dtype: torch.dtype, places: Tensor | None) -> Tensor:
    """See `kernels.messages.unpack`."""
    codes, scales, total = _layout(fmt, columns)
    count = message.shape[0] if places is None else places.shape[0]
    wanted = dtype if dtype == torch.bfloat16 else torch.float32
    values = torch.empty(count, columns, dtype=wanted, device=message.device)
    if count == 0:
        return values.to(dtype)
    words = columns // 8
    bf16 = wanted == torch.bfloat16
    # Tiles that end with each row would leave much of a row's last one idle; but an outer scale is found once
    # a tile only where that has one row.
    flat = not fmt.two_level
    n = WORDS if flat else max(64, min(ROW_WORDS, 1 << (words - 1).bit_length()))
    grid = (cdiv(count * words, n),) if flat else (count, cdiv(words, n))
    kernel.unpack_rows[grid](
        message.view(torch.int32),
        message,
        message.view(torch.float32),
        None if places is None else places.to(torch.int32).contiguous(),
        values.view(torch.int32) if bf16 else values,
        count,
        words,
        total // (4 if fmt.packed else 8),
        total,
        codes,
        scales // 4,
        E2M1=fmt.packed,
        SCALE=by_rows.SCALES[fmt.scale or "", fmt.scale_rule],
        BLOCK_WORDS=(fmt.block_cols or 8) // 8,
        PARTS=0 if places is None else places.shape[1],
        OUTER_MAX=fmt.outer_max or 0.0,
        OUT_BF16=bf16,
        FLAT=flat,
        N=n,
        ASM=use_asm(message.device),
        num_warps=max(1, min(4, n // 64)),
        enable_fp_fusion=False,
    )
    return values.to(dtype)


def can_take(message: Tensor) -> bool:
    """Whether rows are copied by a kernel: all of them at multiples of 8 bytes."""
    aligned = message.shape[1] % 8 == 0 and message.data_ptr() % 8 == 0 and message.is_contiguous()
    return message.numel() > 0 and aligned and reasons.device(message.device) is None


def take_rows(message: Tensor, index: Tensor) -> Tensor:
    """See `kernels.messages.take_rows`."""
    out = message.new_empty(index.shape[0], message.shape[1])
    size = 16 if message.shape[1] % 16 == 0 and message.data_ptr() % 16 == 0 else 8
    units = message.shape[1] // size
    if index.shape[0]:
        kernel.take_rows[(cdiv(index.shape[0] * units, UNITS),)](
            message.view(torch.int32),
            index.to(torch.int64).contiguous(),
            out.view(torch.int32),
            index.shape[0],
            units,
            WORDS=size // 4,
            N=UNITS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _layout(fmt: Format, columns: int) -> tuple[int, int, int]:
    """Bytes at which the codes, the scales and the row end."""
    from nybble.kernels.messages import row_bytes

    codes = blocks.code_shape(fmt, [columns])[-1]
    return codes, codes + blocks.scale_shape(fmt, [columns])[-1], row_bytes(fmt.name, columns)
