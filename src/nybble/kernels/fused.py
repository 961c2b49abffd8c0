"""The passes of `expert_order.py`, `expert_rows.py`, `expert_swiglu.py`, `expert_columns.py` and
`weight_codes.py` as custom ops. Kernels of GPUs serve them too.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nybble.formats import ops, table
from nybble.kernels import expert_columns, expert_order, expert_rows, expert_swiglu, weight_codes
from nybble.kernels.direct import Op, unseen


def direct(x: Any) -> bool:
    """Whether a kernel on `x`, on a GPU, may be launched without an op around it."""
    return unseen(x) and bool(x.is_cuda)


SPECIFICATIONS: dict[str, ModuleType] = {}
"""The module that holds the specification of each op."""


def _op(name: str, module: ModuleType) -> Op:
    SPECIFICATIONS[name] = module
    return Op(torch.library.custom_op(f"nybble::{name}", getattr(module, name), mutates_args=()))


sort_pairs = _op("sort_pairs", expert_order)
count_pairs = _op("count_pairs", expert_order)
row_facts = _op("row_facts", expert_rows)
row_factors = _op("row_factors", expert_rows)
outer_scales = _op("outer_scales", expert_rows)
gather_rows = _op("gather_rows", expert_rows)
combine_rows = _op("combine_rows", expert_rows)
swiglu_rows = _op("swiglu_rows", expert_swiglu)
swiglu_quantize = _op("swiglu_quantize", expert_swiglu)
swiglu_backward = _op("swiglu_backward", expert_swiglu)
swiglu_backward_fp8 = _op("swiglu_backward_fp8", expert_swiglu)
swiglu_backward_both = _op("swiglu_backward_both", expert_swiglu)
quantize_to_rows = _op("quantize_to_rows", expert_rows)
decode_to_rows = _op("decode_to_rows", expert_rows)
token_tiles = _op("token_tiles", expert_columns)
requantize_rows = _op("requantize_rows", expert_columns)
gradient_both = _op("gradient_both", expert_columns)
fp8_columns = _op("fp8_columns", expert_columns)
fp8_columns_of_codes = _op("fp8_columns_of_codes", expert_columns)
transpose_codes = _op("transpose_codes", expert_columns)
gradient_factors = _op("gradient_factors", expert_columns)

codes_and_values = _op("codes_and_values", weight_codes)


@sort_pairs.register_fake
def _(experts, count):  # type: ignore[no-untyped-def]
    return experts.new_empty(experts.numel(), dtype=torch.int32), experts.new_empty(count, dtype=torch.int32)


@count_pairs.register_fake
def _(experts, count):  # type: ignore[no-untyped-def]
    return experts.new_empty(count)


@row_facts.register_fake
def _(order, _k, _rows, pairs):  # type: ignore[no-untyped-def]
    R = order.shape[0]
    return order.new_empty(R), order.new_empty(R), order.new_empty(R if pairs else 0, dtype=torch.int64)


@token_tiles.register_fake
def _(offs, tokens):  # type: ignore[no-untyped-def]
    groups = offs.shape[0]
    return offs.new_empty(3, (tokens // 32 + groups + 3) // 4 * 4), offs.new_empty(groups)


@row_factors.register_fake
def _(order, *_):  # type: ignore[no-untyped-def]
    return order.new_empty(order.shape[0], dtype=torch.float32)


@outer_scales.register_fake
def _(amax, _format):  # type: ignore[no-untyped-def]
    return torch.empty_like(amax)


@gather_rows.register_fake
def _(x, index, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(index.shape[0], x.shape[1])


@combine_rows.register_fake
def _(x, _factor, place, _ends, k):  # type: ignore[no-untyped-def]
    return x.new_empty(place.shape[0] // k, x.shape[1])


@swiglu_rows.register_fake
def _(gate_up, *_):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@swiglu_quantize.register_fake
def _(gate_up, _factor, _ends, _gate_cap, _up_cap, format, *_):  # type: ignore[no-untyped-def]
    R, width = gate_up.shape[0], gate_up.shape[1] // 2
    return *_empty_codes(gate_up, R, width, format), gate_up.new_empty(R, width, dtype=torch.bfloat16)


@swiglu_backward.register_fake
def _(gate_up, _factor, g, _g_factor, _weights, order, *rest):  # type: ignore[no-untyped-def]
    need_gate_up = rest[-1]
    d = gate_up.new_empty(gate_up.shape[0] if need_gate_up else 0, gate_up.shape[1])
    return d, g.new_empty(order.shape[0], dtype=torch.float32)


@swiglu_backward_fp8.register_fake
def _(gate_up, _factor, _g, _g_factor, _weights, order, ends, *_):  # type: ignore[no-untyped-def]
    scales, dots = (order.new_empty(order.shape[0], dtype=torch.float32) for _ in range(2))
    columns = _empty_columns(gate_up, gate_up.shape[0], gate_up.shape[1], ends)[0]
    return torch.empty_like(gate_up, dtype=torch.uint8), columns, scales, dots


@swiglu_backward_both.register_fake
def _(gate_up, _factor, _g, _g_factor, _weights, order, *_):  # type: ignore[no-untyped-def]
    d = (torch.empty_like(gate_up, dtype=torch.bfloat16) for _ in range(2))
    return *d, order.new_empty(order.shape[0], dtype=torch.float32)


@quantize_to_rows.register_fake
def _(x, format, *rest):  # type: ignore[no-untyped-def]
    T, H = x.shape
    return *_empty_codes(x, T, H, format), x.new_empty(rest[-1].shape[0], H, dtype=torch.bfloat16)


@decode_to_rows.register_fake
def _(codes, _scales, _amax, format, index):  # type: ignore[no-untyped-def]
    return codes.new_empty(index.shape[0], _width(codes, format), dtype=torch.bfloat16)


@requantize_rows.register_fake
def _(codes, _scales, _amax, format, index, *_):  # type: ignore[no-untyped-def]
    R = codes.shape[0] if index is None else index.shape[0]
    return codes.new_empty(R, _width(codes, format), dtype=torch.bfloat16)


@gradient_both.register_fake
def _(dy, _format, index, *_):  # type: ignore[no-untyped-def]
    R = dy.shape[0] if index is None else index.shape[0]
    return tuple(dy.new_empty(R, dy.shape[1], dtype=torch.bfloat16) for _ in range(2))


@fp8_columns.register_fake
def _(x, _rounding, _key, _layer, _operand, _rows, offs, index=None, *_):  # type: ignore[no-untyped-def]
    return _empty_columns(x, x.shape[0] if index is None else index.shape[0], x.shape[1], offs)


@fp8_columns_of_codes.register_fake
def _(codes, _scales, _amax, format, index, _rounding, _key, _layer, _operand, _rows, offs, *_):  # type: ignore[no-untyped-def]
    R = codes.shape[0] if index is None else index.shape[0]
    return _empty_columns(codes, R, _width(codes, format), offs)


@transpose_codes.register_fake
def _(codes, offs, index=None, _tiles=None):  # type: ignore[no-untyped-def]
    R = codes.shape[0] if index is None else index.shape[0]
    return _empty_columns(codes, R, codes.shape[1], offs)[0]


@gradient_factors.register_fake
def _(codes, _scales, order=None, *_):  # type: ignore[no-untyped-def]
    R = codes.shape[0] if order is None else order.shape[0]
    return codes.new_empty(R, dtype=torch.float32)


@codes_and_values.register_fake
def _(weight, format, _rounding="nearest", outer="tensor", *_):  # type: ignore[no-untyped-def]
    codes = ops.empty_quantized(weight, table.get(format), list(weight.shape), -1, outer, None)
    return *codes, weight.new_empty(weight.shape, dtype=torch.bfloat16)


def _width(codes: Tensor, format: str) -> int:
    """Features of rows of codes."""
    return codes.shape[1] * (2 if table.get(format).packed else 1)


def _empty_columns(like: Tensor, rows: int, width: int, offs: Tensor) -> tuple[Tensor, Tensor]:
    groups = offs.shape[0]
    codes = like.new_empty(width, 32 * (rows // 32 + groups), dtype=torch.uint8)
    return codes, like.new_empty(groups, width, dtype=torch.float32)


def _empty_codes(like: Tensor, rows: int, width: int, format: str) -> tuple[Tensor, Tensor, Tensor]:
    return ops.empty_quantized(like, table.get(format), [rows, width], -1, "row", None)
