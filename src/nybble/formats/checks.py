"""What quantisers refuse, each with one sentence; shared by the reference, fake kernels and fast kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.errors import NybbleError
from nybble.formats.outer import GRANULARITIES
from nybble.formats.philox import check_range
from nybble.formats.table import Format, get

ROUNDINGS = ("nearest", "stochastic", "eden")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_layout(shape: Sequence[int], format: str, axis: int, outer: str, offs: Tensor | None) -> Format:
    """The format of `shape` quantised along `axis`; NybbleError where that makes no sense."""
    fmt = get(format)
    if len(shape) == 0:
        raise NybbleError("cannot quantise a tensor without dimensions; reshape it to [1]")
    if axis not in (-1, -2) or -axis > len(shape):
        raise NybbleError(
            f"axis must be -1 or -2 and exist in a tensor of {len(shape)} dimensions, not {axis}"
        )
    if outer not in GRANULARITIES:
        raise NybbleError(f"unknown outer scale {outer!r}; choose one of {', '.join(GRANULARITIES)}")
    if fmt.two_level and outer == "matrix" and len(shape) > 3:
        raise NybbleError(f'outer="matrix" takes a tensor of at most 3 dimensions, not {len(shape)}')
    if fmt.two_level and outer == "row" and fmt.square:
        raise NybbleError(
            f'{format} blocks span several rows: outer="row" does not fit; use "tensor" or "matrix"'
        )
    if offs is not None:
        if len(shape) != 2 or offs.dim() != 1 or offs.dtype != torch.int32:
            raise NybbleError(
                "offs must be int32 of one dimension and goes with a tensor of two, [tokens, features]"
            )
        if fmt.square:
            raise NybbleError(
                f"{format} blocks span several rows and cannot follow token groups; use a 1-row format"
            )
        if axis == -2 and fmt.block_cols is None and not fmt.passthrough:
            raise NybbleError(
                f"{format} has one scale a row and no grouped layout along axis -2; use fp8-1x128"
            )
    return fmt


def check_rounding(
    fmt: Format,
    rounding: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    shape: Sequence[int],
) -> None:
    """NybbleError unless the rounding and what it draws from fit the format and the shape."""
    if rounding not in ROUNDINGS:
        raise NybbleError(f"unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
    if rows is not None and (len(shape) != 2 or rows.dim() != 1 or rows.shape[0] != shape[0]):
        raise NybbleError("rows must hold one row index for each row of a tensor of two dimensions")
    if rounding == "nearest":
        return
    if fmt.passthrough:
        raise NybbleError(f"{fmt.name} is passed through and cannot be rounded stochastically; use nearest")
    if rounding == "eden" and (not fmt.two_level or fmt.square or fmt.four_over_six):
        raise NybbleError(f"MS-EDEN rounds to nvfp4 or nvfp4-pow2, not to {fmt.name}")
    if key is None:
        raise NybbleError(f"{rounding} rounding needs a key: nybble.key(seed, step, layer, operand)")
    if key.dtype != torch.int64 or key.dim() != 1 or key.shape[0] not in (3, 4):
        raise NybbleError(
            "key must be an int64 tensor [3] of (seed, step, micro), or [4] with the first element"
        )
    check_range("layer", layer)
    check_range("operand", operand)


def check_quantize(
    x: Tensor,
    format: str,
    axis: int,
    rounding: str,
    outer: str,
    key: Tensor | None,
    layer: int,
    operand: int,
    rows: Tensor | None,
    offs: Tensor | None,
) -> Format:
    """The format of a valid call of quantize; NybbleError for any other."""
    if x.dtype not in DTYPES:
        raise NybbleError(
            f"can quantise float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
        )
    fmt = check_layout(x.shape, format, axis, outer, offs)
    check_rounding(fmt, rounding, key, layer, operand, rows, x.shape)
    return fmt
