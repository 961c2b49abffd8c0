"""Products of operands that stay in codes. Not yet run on this hardware.

Legend: M rows of the first operand, N of the second, K contracted; E experts or groups.
    dense           [M, K] x [N, K]       -> [M, N]       F.scaled_mm, in the dtype asked for
    grouped rows    [M, K] x [E, N, K]    -> [M, N]       F.scaled_grouped_mm 2d-3d, always BF16
    grouped K       [M, P] x [N, P]       -> [E, M, N]    F.scaled_grouped_mm 2d-2d, always BF16
Both operands have the contracted axis last and contiguous, as quantisers store it. The kernels know one outer
scale a matrix at most; Nybble's is one a token. It is therefore multiplied into the product afterwards, in
FP32, and a dense product that needs it is taken in FP32. A grouped product is rounded to BF16 before it is
scaled: that is the only output these kernels have.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.errors import NybbleError
from nybble.formats import QTensor
from nybble.kernels.blackwell import choice
from nybble.kernels.blackwell.coded import Coded, coded
from nybble.kernels.blackwell.swizzle import (
    Swizzled,
    round_up,
    swizzle,
    swizzle_column_groups,
    swizzle_row_groups,
)


def scaled_linear(xq: QTensor, wq: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [M, K] @ w [N, K].T, both quantised along K, outer scales included: [M, N] in `out_dtype`.

    Raises NybbleError with the reason where the product cannot run.
    """
    _need(xq, wq, None)
    scale = _outer(xq, wq)
    y = product(_coded(xq), _coded(wq), torch.float32 if scale is not None else out_dtype)
    return y if scale is None else (y * scale).to(out_dtype)


def scaled_grouped(xq: QTensor, wq: QTensor, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each group's rows of x [M, K] times its matrix of w [E, N, K], transposed: [M, N] in `out_dtype`.

    `offs` int32 [E] holds the cumulative ends of the groups; rows at or beyond the last give zeros.
    """
    _need(xq, wq, "rows", offs.shape[0])
    y = product_of_rows(_coded(xq), _coded(wq), offs)
    if not xq.spec.two_level:
        return y.to(out_dtype)
    row = torch.arange(y.shape[0], device=y.device, dtype=offs.dtype)
    expert = torch.searchsorted(offs, row, right=True).clamp(max=offs.shape[0] - 1)
    x_scale, w_scale = xq.tensor_scale, wq.tensor_scale
    if xq.outer == "matrix":
        x_scale = x_scale[expert if xq.offs is not None else torch.zeros_like(expert)]
    if wq.outer == "row":
        w_scale = w_scale[expert]  # [M, N]: one a column of the product
    elif w_scale.dim():
        w_scale = w_scale[expert][:, None]
    x_scale = x_scale[:, None] if x_scale.dim() else x_scale
    return (y.float() * x_scale * w_scale).to(out_dtype)


def scaled_wgrad(dyq: QTensor, xq: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """dy [T, N].T @ x [T, K] over each group's tokens, both quantised along T in the same groups: [E, N, K].

    An empty group gives zeros.
    """
    if dyq.offs is None or xq.offs is None:
        raise NybbleError("wgrad takes tokens in groups; quantise both operands along axis -2 with offs")
    _need(dyq, xq, "columns", dyq.offs.shape[0])
    return product_of_groups(_coded(dyq), _coded(xq)).to(out_dtype)


def product(a: Coded, b: Coded, dtype: torch.dtype) -> Tensor:
    """[M, N] without outer scales; `dtype` is float32, bfloat16 or float16."""
    _match(a, b)
    m, n = a.codes.shape[0], b.codes.shape[0]
    if 0 in (m, n, a.length):
        return a.codes.new_zeros(m, n, dtype=dtype)
    # Rows of zeros that are added to b lie in the padding of its scales: 128 is a multiple of 16.
    y = _dense(
        a.padded_codes(), b.padded_codes(rows=True), swizzle(a.scales), swizzle(b.scales), a.format, dtype
    )
    return y[:, :n]


def product_of_rows(a: Coded, w: Coded, offs: Tensor) -> Tensor:
    """[M, N] in BF16, without outer scales; rows at or beyond offs[-1] are zero."""
    _match(a, w)
    m, (e, n) = a.codes.shape[0], w.codes.shape[:2]
    if 0 in (m, e, n, a.length):
        return a.codes.new_zeros(m, n, dtype=torch.bfloat16)
    if offs.shape[0] != e:
        raise NybbleError(f"offs names {offs.shape[0]} groups and w has {e} matrices; they must be as many")
    scales = swizzle_row_groups(a.scales, offs)
    y = _grouped(a.padded_codes(), w.padded_codes(rows=True), scales, swizzle(w.scales), a.format, offs)
    outside = torch.arange(m, device=y.device) >= offs[-1]
    return y.masked_fill_(outside[:, None], 0)[:, :n]  # the kernel leaves those rows as it found them


def product_of_groups(a: Coded, b: Coded) -> Tensor:
    """[E, M, N] in BF16, without outer scales; zero for an empty group."""
    _match(a, b)
    if a.ends is None or b.ends is None:
        raise NybbleError("a product over token groups takes operands that are packed in groups")
    m, n, e = a.codes.shape[0], b.codes.shape[0], a.ends.shape[0]
    if 0 in (m, n, e, a.length):
        return a.codes.new_zeros(e, m, n, dtype=torch.bfloat16)
    stops = a.ends // a.block
    a_scales, b_scales = (swizzle_column_groups(operand.scales, stops) for operand in (a, b))
    ends = a.ends.to(torch.int32)
    y = _grouped(a.padded_codes(), b.padded_codes(rows=True), a_scales, b_scales, a.format, ends)
    empty = torch.diff(stops, prepend=stops.new_zeros(1)) == 0
    return y.masked_fill_(empty[:, None, None], 0)[..., :n]  # the kernel skips groups without tokens


def _dense(
    a: Tensor, b: Tensor, a_scale: Swizzled, b_scale: Swizzled, format: str, dtype: torch.dtype
) -> Tensor:
    """F.scaled_mm of padded codes a [M, L] and b [N, L]."""
    _check_scale("a", a, a_scale, format, round_up(a.shape[0], 128))
    _check_scale("b", b, b_scale, format, round_up(b.shape[0], 128))
    element, scale, recipe = _types(format)
    return F.scaled_mm(
        a.view(element), b.t().view(element),
        a_scale.data.view(scale), recipe, b_scale.data.view(scale), recipe,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4, swizzle_b=F.SwizzleType.SWIZZLE_32_4_4, output_dtype=dtype,
    )  # fmt: skip


def _grouped(a: Tensor, b: Tensor, a_scale: Swizzled, b_scale: Swizzled, format: str, offs: Tensor) -> Tensor:
    """F.scaled_grouped_mm of padded codes a [M, L] and b [E, N, L] or [N, L]; offs in values."""
    groups = offs.shape[0]
    columns = b.dim() == 2
    rows = round_up(a.shape[0], 128) if columns else 128 * (a.shape[0] // 128 + groups)
    _check_scale("a", a, a_scale, format, rows, groups if columns else 0)
    _check_scale("b", b, b_scale, format, round_up(b.shape[-2], 128), groups if columns else 0)
    element, scale, recipe = _types(format)
    a_scales: Any = a_scale.data.view(scale).view(a_scale.rows, a_scale.cols)
    b_scales: Any = b_scale.data.view(scale)
    b_scales = b_scales.view(b_scale.rows, b_scale.cols) if columns else b_scales
    recipes: Any = recipe
    swizzles: Any = F.SwizzleType.SWIZZLE_32_4_4
    if element == torch.float4_e2m1fn_x2:
        # The grouped NVFP4 kernel insists on an outer scale a group.
        ones = torch.ones(groups, dtype=torch.float32, device=a.device)
        a_scales, b_scales = [a_scales, ones], [b_scales, ones]
        recipes = [recipe, F.ScalingType.TensorWise]
        swizzles = [swizzles, F.SwizzleType.NO_SWIZZLE]
    grouped_mm: Any = F.scaled_grouped_mm  # type: ignore[attr-defined]  # left out of torch's stubs
    out: Tensor = grouped_mm(
        a.view(element), b.transpose(-2, -1).view(element), a_scales, recipes, b_scales, recipes,
        swizzle_a=swizzles, swizzle_b=swizzles, offs=offs, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out


def _types(format: str) -> tuple[torch.dtype, torch.dtype, F.ScalingType]:
    """dtypes of codes and scales, and what a scale covers."""
    if format.startswith("nvfp4"):
        return torch.float4_e2m1fn_x2, torch.float8_e4m3fn, F.ScalingType.BlockWise1x16
    return torch.float8_e4m3fn, torch.float8_e8m0fnu, F.ScalingType.BlockWise1x32


def _check_scale(name: str, codes: Tensor, scale: Swizzled, format: str, rows: int, groups: int = 0) -> None:
    """Raise unless `scale` is swizzled and of the size of `codes`: kernels read linear scales without a
    word."""
    if not isinstance(scale, Swizzled):
        raise NybbleError(f"scale of {name} is a {type(scale).__name__} in linear order; swizzle it first")
    blocks = codes.shape[-1] * 2 // 16 if format.startswith("nvfp4") else codes.shape[-1] // 32
    cols = 4 * (blocks // 4 + groups) if groups else round_up(blocks, 4)
    lead = codes.shape[:-2]
    want = (*lead, rows * cols)
    if (scale.rows, scale.cols) != (rows, cols) or tuple(scale.data.shape) != want:
        raise NybbleError(
            f"scale of {name} holds {scale.rows} x {scale.cols}, shape {tuple(scale.data.shape)}, where "
            f"codes of {tuple(codes.shape)} need {rows} x {cols}; swizzle the scales of these codes"
        )


def _match(a: Coded, b: Coded) -> None:
    if a.length != b.length:
        raise NybbleError(f"operands contract {a.length} and {b.length} values; they must be as many")


def _coded(q: QTensor) -> Coded:
    return coded(q.codes, q.scales, q.format, q.shape, q.axis, q.offs)


def _need(a: QTensor, b: QTensor, grouped: str | None, groups: int = 0) -> None:
    reason = choice.can_run(a.codes.device, a.format, b.format, grouped, groups)
    if reason:
        raise NybbleError(f"cannot multiply {a.format} and {b.format} natively: {reason}; dequantise them")


def _outer(a: QTensor, b: QTensor) -> Tensor | None:
    """Outer scale of the product [M, N], in a shape that broadcasts; None for formats of one level."""
    if not a.spec.two_level:
        return None
    x, w = a.tensor_scale, b.tensor_scale
    return (x[:, None] if x.dim() else x) * w
