"""Whether a product runs natively, and the reason where it does not. Not yet run on this hardware."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F

from nybble.errors import NybbleError
from nybble.formats import table
from nybble.kernels import dispatch

STATUS = "native Blackwell GEMMs (F.scaled_mm, F.scaled_grouped_mm): not yet run on this hardware"
"""To print wherever this path is chosen."""

KERNELS = ("auto", "native", "dequantise")
MAX_GROUPS = 1024
"""The grouped kernels set up each group by one thread of one block."""

_log = logging.getLogger(__name__)
_kernel = "auto"


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Within this context, in all threads, choose how layers multiply quantised operands.

    "auto" takes the native product where it can run, "native" insists on it and raises NybbleError with the
    reason where it cannot, "dequantise" never takes it.
    """
    global _kernel
    if name not in KERNELS:
        raise NybbleError(f"unknown kernel {name!r}; choose one of {', '.join(KERNELS)}")
    before, _kernel = _kernel, name
    try:
        yield
    finally:
        _kernel = before


def can_run(
    device: torch.device | str, a: str, b: str | None = None, grouped: str | None = None, groups: int = 0
) -> str | None:
    """Why `device` cannot multiply operands of formats `a` and `b` natively; None if it can.

    Sizes are no reason: tails are padded with zeros.

    Args:
        device: where the operands are.
        a: format of the first operand.
        b: of the second; None is the same.
        grouped: None for one product, "rows" for groups of rows of the first operand (fprop and dgrad of
            experts), "columns" for groups along the contraction (wgrad of experts).
        groups: how many groups there are.
    Raises:
        NybbleError: for a format or a grouping that does not exist.
    """
    first, second = table.get(a), table.get(a if b is None else b)
    if grouped not in (None, "rows", "columns"):
        raise NybbleError(f'grouped is None, "rows" or "columns", not {grouped!r}')
    return _formats_reason(first, second, grouped) or _device_reason(torch.device(device), grouped, groups)


def chosen(device: torch.device, a: str, b: str, grouped: str | None = None, groups: int = 0) -> bool:
    """Whether layers multiply operands of these formats natively.

    Raises NybbleError with the reason where `kernel("native")` asks for what cannot be done; operands that
    are both in BF16 or FP32 have no native product and are not asked about.
    """
    plain = table.get(a).passthrough and table.get(b).passthrough
    if (
        plain
        or _kernel == "dequantise"
        or (_kernel == "auto" and (device.type != "cuda" or dispatch.forced()))
    ):
        return False
    reason = can_run(device, a, b, grouped, groups)
    if reason and _kernel == "native":
        raise NybbleError(
            f'kernel "native" cannot multiply {a} and {b} on {device}: {reason}; choose "auto" to dequantise'
        )
    return reason is None


def _formats_reason(a: table.Format, b: table.Format, grouped: str | None) -> str | None:
    for fmt in (a, b):
        if not ((fmt.packed and fmt.scale == "e4m3") or (fmt.element == "e4m3" and fmt.scale == "e8m0")):
            return f"{fmt.name} has no native product here, only NVFP4 and MXFP8 do"
    if a.element != b.element:
        return f"{a.name} and {b.name} have different elements"
    if grouped == "columns" and a.packed:
        return f"{a.name} groups along tokens start every 16 values, and the kernel needs 32"
    return None


# Constant for a process: a compiled graph need not look into it.
@torch.compiler.assume_constant_result
def _device_reason(device: torch.device, grouped: str | None, groups: int) -> str | None:
    return _device_reason_once(device, grouped, groups)


@cache
def _device_reason_once(device: torch.device, grouped: str | None, groups: int) -> str | None:
    reason = _find_reason(device, grouped, groups)
    if device.type == "cuda":
        what = "grouped products" if grouped else "products"
        if reason is None:
            _log.warning("%s on %s: %s", what, device, STATUS)
        else:
            _log.info("%s on %s dequantise their operands: %s", what, device, reason)
    return reason


def _find_reason(device: torch.device, grouped: str | None, groups: int) -> str | None:
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    if torch.version.hip is not None or torch.version.cuda is None:
        return "torch was not built for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 10:
        return f"compute capability {major}.{minor} is below 10.0"
    if grouped and major != 10:
        return f"grouped products need compute capability 10, not {major}.{minor}"
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < (12, 8):
        return f"CUDA {torch.version.cuda} is older than 12.8"
    function = "scaled_grouped_mm" if grouped else "scaled_mm"
    if not hasattr(F, function):
        return f"torch {torch.__version__} has no torch.nn.functional.{function}"
    if groups > MAX_GROUPS:
        return f"{groups} groups are more than the {MAX_GROUPS} of the kernel"
    return None
