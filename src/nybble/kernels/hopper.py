"""Products of experts on Hopper's FP8 tensor cores: E4M3 codes with one scale a row of either operand.

The kernels of `cuda/launch_fp8.py` multiply, faster than torch's `_scaled_grouped_mm` at every shape that was
measured; torch's serves where Triton is a release with which they were not compiled. Both want the contracted
axis contiguous in both operands: `fp8_columns` of `expert_columns.py` stores it so.
"""

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from nybble.errors import NybbleError
from nybble.kernels import dispatch
from nybble.kernels.fused import direct

FORMAT = "fp8-row"
ALIGN = 16
LONGEST = 1 << 30
"""Rows or columns that the descriptors of the kernels can count."""
TRITON = ("3.6", "3.7", "3.8", "3.9")
"""Releases whose Gluon compiles the kernels; they have run with 3.6 alone."""
FP8 = torch.float8_e4m3fn
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RowScaled:
    """An operand in codes: it stands where its values would. The contracted axis is last."""

    codes: Tensor
    """E4M3 [..., R, L]."""
    scales: Tensor | None
    """FP32: one a row, [..., R]; of token groups along L, [G, R], or None where all are 1."""
    ends: Tensor | None = None
    """int32 [G]: where groups end along L."""
    index: Tensor | None = None
    """int32: which row of `codes` and `scales` each row of the operand is; its own where None."""

    def index_select(self, dim: int, index: Tensor) -> "RowScaled":
        """Rows `index` (int32) of a 2-D operand, which the product reads where they lie; `dim` is 0."""
        assert dim == 0
        assert self.index is None
        return replace(self, index=index)


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
    cores = "FP8 tensor cores" if own_reason() is None else f"FP8 tensor cores by torch: {own_reason()}"
    _log.info("FP8 products of experts on %s: %s", device, reason or cores)
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


def own_kernels(device: torch.device) -> bool:
    """Whether products on `device` are by the kernels of this project that are written for Hopper."""
    return _reason(device) is None and own_reason() is None


@cache
def own_reason() -> str | None:
    """Why torch multiplies in place of the kernels of this project; None where these do."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed"
    if ".".join(version.split(".")[:2]) not in TRITON:
        return f"the kernels compile with Gluon of triton {', '.join(TRITON)}; {version} was not tried"
    return None


def product_of_rows(a: RowScaled, w: RowScaled, offs: Tensor) -> Tensor:
    """Each group's rows of a [R, C] times its matrix of w, stored [E, N, C]: BF16 [R, N].

    Rows at or beyond offs[-1] may hold anything.
    """
    _check(w.codes.shape[-2:])
    assert a.scales is not None
    assert w.scales is not None
    op = _multiply_rows if direct(a.codes) else _product_of_rows
    return op(a.codes, a.scales, w.codes, w.scales, offs, a.index)


def product_of_groups(a: RowScaled, b: RowScaled, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a [N, P] times b [K, P] transposed, over each group of P alone: [G, N, K] in `dtype`, BF16 or FP32."""
    assert a.ends is not None
    assert b.scales is not None
    _check((a.codes.shape[0], b.codes.shape[0]))
    op = _multiply_groups if direct(a.codes) else _product_of_groups
    return op(a.codes, a.scales, b.codes, b.scales, a.ends, dtype)


def _check(sizes: Sequence[int]) -> None:
    if any(size % ALIGN for size in sizes):
        raise NybbleError(
            f"FP8 products of experts need widths that are multiples of {ALIGN}, and these are "
            f"{' and '.join(map(str, sizes))}; choose the recipe inkling"
        )


def torch_rows(
    codes: Tensor,
    scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    offs: Tensor,
    index: Tensor | None = None,
) -> Tensor:
    """What `launch_fp8.product_of_rows` gives, by torch."""
    if index is not None:
        codes = codes.view(torch.uint8).index_select(0, index).view(FP8)
        scales = scales.index_select(0, index)
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


def torch_groups(
    a_codes: Tensor,
    a_scales: Tensor | None,
    b_codes: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """What `launch_fp8.product_of_groups` gives, by torch: rounded to BF16."""
    if a_scales is None:
        a_scales = b_scales.new_ones(ends.shape[0], a_codes.shape[0])
    return torch._scaled_grouped_mm(
        a_codes,
        b_codes.t(),
        a_scales.reshape(-1),
        b_scales.reshape(-1),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    ).to(dtype)


def _multiply_rows(
    codes: Tensor, scales: Tensor, w_codes: Tensor, w_scales: Tensor, offs: Tensor, index: Tensor | None
) -> Tensor:
    rows = codes.shape[0] if index is None else index.shape[0]
    if own_reason() is not None or rows >= LONGEST:
        return torch_rows(codes, scales, w_codes, w_scales, offs, index)
    from nybble.kernels.cuda import launch_fp8

    with torch.cuda.device(codes.device):
        return launch_fp8.product_of_rows(codes, scales, w_codes, w_scales, offs, index)


def _multiply_groups(
    codes: Tensor, scales: Tensor | None, b_codes: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    if own_reason() is not None or codes.shape[1] >= LONGEST:
        return torch_groups(codes, scales, b_codes, b_scales, ends, dtype)
    from nybble.kernels.cuda import launch_fp8

    with torch.cuda.device(codes.device):
        return launch_fp8.product_of_groups(codes, scales, b_codes, b_scales, ends, dtype)


_product_of_rows = torch.library.custom_op("nybble::fp8_product_of_rows", _multiply_rows, mutates_args=())
_product_of_groups = torch.library.custom_op(
    "nybble::fp8_product_of_groups", _multiply_groups, mutates_args=()
)


@_product_of_rows.register_fake
def _(codes, _scales, w_codes, _w_scales, _offs, index):  # type: ignore[no-untyped-def]  # the op's own
    rows = codes.shape[0] if index is None else index.shape[0]
    return codes.new_empty(rows, w_codes.shape[1], dtype=torch.bfloat16)


@_product_of_groups.register_fake
def _(codes, _scales, b_codes, _b_scales, ends, dtype):  # type: ignore[no-untyped-def]  # the op's own
    return codes.new_empty(ends.shape[0], codes.shape[0], b_codes.shape[0], dtype=dtype)
