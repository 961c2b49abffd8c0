"""Rows of a tensor as bytes to be sent: all that a row needs lies side by side, in one buffer.

    row of a message = codes | block scales | outer amax, FP32 | zeros up to a multiple of 8    NVFP4
                       codes | block scales                                                    MXFP8
                       values                                                                  BF16, FP32

So a message of R rows is uint8 [R, row_bytes], rows can be gathered and split among receivers, and a row of C
MXFP8 values takes C + C/32 bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble import formats
from nybble.formats import blocks, ops
from nybble.formats.table import Format
from nybble.kernels import dispatch

_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ALIGN = 8


def plain(format: str) -> bool:
    """Whether values travel as they are, without scales."""
    return format in _PLAIN


def row_bytes(format: str, columns: int) -> int:
    """Bytes of a row of `columns` values."""
    if plain(format):
        return columns * _PLAIN[format].itemsize
    return _parts(formats.get(format), columns)[-1]


def pack(
    x: Tensor,
    format: str,
    rounding: str = "nearest",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """x [R, C] as a message, uint8 [R, row_bytes]. Outer scales are one a row; other arguments as for
    `nybble::quantize`."""
    if plain(format):
        values = x.detach().to(_PLAIN[format]).contiguous()
        return values.view(torch.uint8).view(x.shape[0], row_bytes(format, x.shape[1]))
    fmt = formats.get(format)
    if x.is_cuda and not dispatch.forced():
        from nybble.kernels.cuda import launch_messages

        if rounding != "eden" and launch_messages.can_pack(x, fmt):
            return launch_messages.pack(x, fmt, rounding, key, layer, operand, rows)
    codes, scales, amax = ops.quantize(
        x, format, -1, rounding, "row" if fmt.two_level else "tensor", key, layer, operand, rows
    )
    code_end, scale_end, amax_end, total = _parts(fmt, x.shape[1])
    message = codes.new_zeros(x.shape[0], total)
    message[:, :code_end] = codes
    message[:, code_end:scale_end] = scales
    if fmt.two_level:
        message[:, scale_end:amax_end] = amax.view(-1, 1).view(torch.uint8)
    return message


def take_rows(message: Tensor, index: Tensor) -> Tensor:
    """Rows of a message, as many bytes at a time as divide a row."""
    if message.is_cuda and not dispatch.forced():
        from nybble.kernels.cuda import launch_messages

        if launch_messages.can_take(message):
            return launch_messages.take_rows(message, index)
    wide = next(d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if _fits(message, d))
    return message.view(wide).index_select(0, index).view(torch.uint8)


def _fits(message: Tensor, dtype: torch.dtype) -> bool:
    return message.shape[1] % dtype.itemsize == 0 and message.data_ptr() % dtype.itemsize == 0


def unpack_codes(message: Tensor, format: str, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, amax) of a message of a quantised format, as `nybble::quantize` returns them."""
    fmt = formats.get(format)
    code_end, scale_end, amax_end, _ = _parts(fmt, columns)
    amax = message.new_empty(0, dtype=torch.float32)
    if fmt.two_level:
        amax = message.new_empty(message.shape[0], 4).copy_(message[:, scale_end:amax_end])
        amax = amax.view(torch.float32).view(-1)
    return message[:, :code_end].contiguous(), message[:, code_end:scale_end].contiguous(), amax


def unpack(
    message: Tensor, format: str, columns: int, dtype: torch.dtype, places: Tensor | None = None
) -> Tensor:
    """Values [R, columns] of a message; or, with `places`, sums of its rows.

    Args:
        places: int32 [T, m], rows of the message that make up each row of the result; below 0 is none. They
            are added in FP32, in this order.
    Returns:
        [R, columns], or [T, columns], in `dtype`.
    """
    if plain(format):
        values = message.view(_PLAIN[format])
        return values.to(dtype) if places is None else add_rows(values, places).to(dtype)
    fmt = formats.get(format)
    if message.is_cuda and not dispatch.forced():
        from nybble.kernels.cuda import launch_messages

        if launch_messages.can_unpack(message, fmt, columns):
            return launch_messages.unpack(message, fmt, columns, dtype, places)
    wanted = dtype if places is None else torch.float32
    outer = "row" if fmt.two_level else "tensor"
    shape = [message.shape[0], columns]
    parts = unpack_codes(message, format, columns)
    values = ops.dequantize(*parts, format, -1, shape, wanted, outer, True)
    return values if places is None else add_rows(values, places).to(dtype)


def add_rows(values: Tensor, places: Tensor) -> Tensor:
    """Sums of rows of `values` [R, C], FP32 [T, C]; `places` as for `unpack`."""
    if values.shape[0] and not values.is_cuda:
        present = places >= 0
        ends = present.sum(1).cumsum(0).to(places.dtype)
        starts = torch.cat([ends.new_zeros(1), ends])[: len(ends)]
        return F.embedding_bag(places[present], values.float(), starts, mode="sum")
    out = values.new_zeros(places.shape[0], values.shape[1], dtype=torch.float32)
    if values.shape[0] == 0:
        return out
    for column in places.unbind(1):
        rows = values.index_select(0, column.clamp(min=0)).float()
        out += rows.masked_fill_((column < 0).unsqueeze(-1), 0.0)
    return out


def _parts(fmt: Format, columns: int) -> tuple[int, int, int, int]:
    """Where codes, scales, amax and the row end, in bytes."""
    codes = blocks.code_shape(fmt, [columns])[-1]
    scales = codes + blocks.scale_shape(fmt, [columns])[-1] * blocks.scale_dtype(fmt).itemsize
    if not fmt.two_level:
        return codes, scales, scales, scales
    return codes, scales, scales + 4, -(-(scales + 4) // _ALIGN) * _ALIGN
