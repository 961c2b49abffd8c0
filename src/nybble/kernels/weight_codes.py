"""The operand of a weight in two forms from one pass: values for one product, and codes that another's is
re-rounded from."""

import torch
from torch import Tensor

from nybble.formats import ops


def codes_and_values(
    weight: Tensor,
    format: str,
    rounding: str = "nearest",
    outer: str = "tensor",
    key: Tensor | None = None,
    layer: int = 0,
    operand: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, amax) of a weight along its last axis, as `nybble::quantize` gives them, and values.

    Values are BF16, of the shape of the weight, and without their outer scale.
    """
    q = ops.quantize(weight, format, -1, rounding, outer, key, layer, operand)
    return *q, ops.dequantize(*q, format, -1, weight.shape, torch.bfloat16, outer, False)
