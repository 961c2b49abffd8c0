"""Products of experts on Hopper's FP8 tensor cores: E4M3 codes with one scale a row of either operand.

torch's `_scaled_grouped_mm` wants the contracted axis contiguous in both operands, and groups along it that
begin every 16 values: `fp8_columns` of `expert_rows.py` stores them so.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nybble.errors import NybbleError
from nybble.kernels import dispatch
from nybble.kernels.fused import direct

FORMAT = "fp8-row"
ALIGN = 16
FP8 = torch.float8_e4m3fn
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RowScaled:
    """An operand in codes: it stands where its values would. The contracted axis is last."""

    codes: Tensor
    """E4M3 [..., R, L]."""
    scales: Tensor
    """FP32: one a row, [..., R]; of token groups along L, [G, R]."""
    ends: Tensor | None = None
    """int32 [G]: where groups end along L."""

    def index_select(self, dim: int, index: Tensor) -> "RowScaled":
        """Rows `index` of a 2-D operand; `dim` is 0."""
        codes = self.codes.view(torch.uint8).index_select(dim, index).view(FP8)
        return RowScaled(codes, self.scales.index_select(dim, index))


def row_scaled(codes: Tensor, scales: Tensor, ends: Tensor | None = None) -> RowScaled:
    """What `nybble::quantize` gave in fp8-row, or `nybble::fp8_columns` with the ends of its groups."""
    return RowScaled(codes.view(FP8), scales if ends is not None else scales.squeeze(-1), ends)


def chosen(device: torch.device, a: str, b: str, grouped: str | None) -> bool:
    """Whether layers multiply operands of these formats in codes."""
    if a != FORMAT or b != FORMAT or grouped is None or device.type != "cuda" or dispatch.forced():
        return False
    return _reason(device) is None


def can_run(device: torch.device | str) -> str | None:
    """Why `device` does not multiply FP8 codes of experts; None if it does."""
    return _find_reason(torch.device(device))


# Constant for a process: a compiled graph need not look into it.
@torch.compiler.assume_constant_result
def _reason(device: torch.device) -> str | None:
    return _reason_once(device)


@cache
def _reason_once(device: torch.device) -> str | None:
    reason = _find_reason(device)
    _log.info("FP8 products of experts on %s: %s", device, reason or "FP8 tensor cores")
    return reason


def _find_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU is available"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"grouped FP8 products with row scales run on compute capability 9, not {major}.{minor}"
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"torch {torch.__version__} has no _scaled_grouped_mm"
    return None


def product_of_rows(a: RowScaled, w: RowScaled, offs: Tensor) -> Tensor:
    """Each group's rows of a [R, C] times its matrix of w, stored [E, N, C]: BF16 [R, N].

    Rows at or beyond offs[-1] may hold anything.
    """
    _check(w.codes.shape[-2:])
    op = _multiply_rows if direct(a.codes) else _product_of_rows
    return op(a.codes, a.scales, w.codes, w.scales, offs)


def product_of_groups(a: RowScaled, b: RowScaled) -> Tensor:
    """a [N, P] times b [K, P] transposed, over each group of P alone: BF16 [G, N, K]."""
    assert a.ends is not None
    _check((a.codes.shape[0], b.codes.shape[0]))
    op = _multiply_groups if direct(a.codes) else _product_of_groups
    return op(a.codes, a.scales, b.codes, b.scales, a.ends)


def _check(sizes: Sequence[int]) -> None:
    if any(size % ALIGN for size in sizes):
        raise NybbleError(
            f"FP8 products of experts need widths that are multiples of {ALIGN}, and these are "
            f"{' and '.join(map(str, sizes))}; choose the recipe inkling"
        )


def _multiply_rows(codes: Tensor, scales: Tensor, w_codes: Tensor, w_scales: Tensor, offs: Tensor) -> Tensor:
    # Partial sums are added in FP32: fast accumulation, a tenth faster, keeps fewer bits of them.
    return torch._scaled_grouped_mm(
        codes,
        w_codes.transpose(-2, -1),
        scales,
        w_scales,
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _multiply_groups(
    codes: Tensor, scales: Tensor, b_codes: Tensor, b_scales: Tensor, ends: Tensor
) -> Tensor:
    return torch._scaled_grouped_mm(
        codes,
        b_codes.t(),
        scales.reshape(-1),
        b_scales.reshape(-1),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


_product_of_rows = torch.library.custom_op("nybble::fp8_product_of_rows", _multiply_rows, mutates_args=())
_product_of_groups = torch.library.custom_op(
    "nybble::fp8_product_of_groups", _multiply_groups, mutates_args=()
)


@_product_of_rows.register_fake
def _(codes, _scales, w_codes, *_):  # type: ignore[no-untyped-def]  # the op's own
    return codes.new_empty(codes.shape[0], w_codes.shape[1], dtype=torch.bfloat16)


@_product_of_groups.register_fake
def _(codes, _scales, b_codes, _b_scales, ends):  # type: ignore[no-untyped-def]  # the op's own
    return codes.new_empty(ends.shape[0], codes.shape[0], b_codes.shape[0], dtype=torch.bfloat16)
