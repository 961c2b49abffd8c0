"""Why a call has no Triton kernel, in a few words; None where it has one."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from nybble.formats.table import Format
from nybble.kernels.cuda.column_source import TILE
from nybble.kernels.cuda.launch_columns import too_many


@cache
def device(of: torch.device) -> str | None:
    """For a device; triton is taken to be installed."""
    if of.type == "cuda" and torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    if of.type == "cuda" and torch.cuda.get_device_capability(of) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def quantize(
    fmt: Format, shape: Sequence[int], axis: int, outer: str, offs: Tensor | None, *, values: bool
) -> str | None:
    """For quantize (codes) and fake_quantize (values)."""
    if fmt.passthrough:
        return f"{fmt.name} is a cast, which torch does"
    if math.prod(shape) == 0 or (offs is not None and offs.numel() == 0):
        return "there is nothing to quantise"
    lead = math.prod(shape[:-2])
    if fmt.square:
        if fmt.four_over_six:
            return f"{fmt.name} adds the errors of a block in one sequence, which no kernel does"
        if axis == -2 and not values:
            return f"{fmt.name} codes along axis -2 have no kernel"
        if len(shape) == 1 or (len(shape) > 3 and outer != "tensor"):
            return f"{fmt.name} kernels take matrices"
        if lead > 1 and shape[-2] % fmt.block_rows:
            return f"{fmt.name} kernels take several matrices only if their rows fill blocks"
        return too_many(lead, shape[-2], fmt.block_rows, 0)
    if axis == -2:
        if fmt.four_over_six:
            return f"{fmt.name} along axis -2 has no kernel"
        return too_many(lead, shape[-2], fmt.block_cols or TILE, 0 if offs is None else offs.shape[0])
    return None


def dequantize(fmt: Format, shape: Sequence[int], axis: int, offs: Tensor | None) -> str | None:
    """For dequantize."""
    if fmt.passthrough:
        return f"{fmt.name} is a cast, which torch does"
    if math.prod(shape) == 0 or (offs is not None and offs.numel() == 0):
        return "there is nothing to dequantise"
    if axis == -2 and offs is not None:
        return "grouped codes along axis -2 have no decoding kernel"
    length = shape[axis]
    if length % 8:
        return "rows of codes are not whole 32-bit words"
    lead, height = math.prod(shape[:-2]), shape[-2 if axis == -1 else -1] if len(shape) > 1 else 1
    if fmt.square and lead > 1 and height % fmt.block_rows:
        return f"{fmt.name} kernels take several matrices only if their rows fill blocks"
    return None


def requantize(
    fmt: Format, axis: int, to: Format, to_axis: int, shape: Sequence[int], offs: Tensor | None
) -> str | None:
    """For one pass from codes to codes; what has none goes through FP32 values."""
    if fmt.scale != "e4m3" or axis != -1 or to_axis != -2:
        return "only NVFP4 codes along axis -1 are re-rounded in one pass, along axis -2"
    if to.two_level or to.passthrough or to.square:
        return f"{to.name} is not re-rounded in one pass"
    if math.prod(shape) == 0 or len(shape) > 3 or shape[-1] % 8 or (offs is not None and offs.numel() == 0):
        return "the shape does not fit"
    if fmt.square and len(shape) == 3 and shape[-2] % fmt.block_rows:
        return "blocks span matrices"
    return too_many(
        math.prod(shape[:-2]), shape[-2], to.block_cols or TILE, 0 if offs is None else offs.shape[0]
    )
