"""The published CUDA kernels of Mamba-2 (packages mamba_ssm and causal_conv1d), where they are installed.

Never needed. They have not been run with this model: no machine of its makers had them installed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nybble.models.nemotron_h.scan import Shape


@cache
def _functions() -> tuple[Any, Any] | str:
    """(convolution, scan), or what is missing."""
    try:
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        return f"{error.name or error} is not installed"
    return causal_conv1d_fn, mamba_chunk_scan_combined


def cannot_run(device: torch.device, kernel: int) -> str | None:
    """Why a Mamba layer with a convolution of `kernel` taps is computed without them, or None."""
    if device.type != "cuda":
        return f"they are for CUDA, and the model is on {device.type}"
    found = _functions()
    if isinstance(found, str):
        return found
    return None if 2 <= kernel <= 4 else f"they have convolutions of 2 to 4 taps, not {kernel}"


@torch.compiler.disable
def conv_and_scan(
    xbc: Tensor,
    dt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    limit: float,
    shape: Shape,
    chunk: int,
    segments: Tensor | None,
) -> Tensor:
    """Convolution, SiLU and recurrence.

    Args:
        xbc: [B, S, width] before the convolution.
        dt: [B, S, H] before its bias and softplus.
        weight: [width, K].
        bias: [width] or None.
        A, D, dt_bias: [H] FP32.
        limit: smallest step.
        shape: sizes.
        chunk: tokens of a chunk.
        segments: [B, S] documents, or None.

    Returns:
        [B, S, H * P].
    """
    found = _functions()
    assert not isinstance(found, str)
    convolve, scan = found
    H, P, G, N = shape
    documents = None if segments is None else segments.to(torch.int32).contiguous()
    dtype = xbc.dtype
    mixed = convolve(
        xbc.transpose(1, 2),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        seq_idx=documents,
        activation="silu",
    ).transpose(1, 2)
    x, b, c = mixed.split([H * P, G * N, G * N], dim=-1)
    y: Tensor = scan(
        x.unflatten(-1, (H, P)),
        dt,
        A,
        b.unflatten(-1, (G, N)),
        c.unflatten(-1, (G, N)),
        chunk_size=chunk,
        D=D,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=(limit, float("inf")),
        seq_idx=documents,
    )
    return y.flatten(-2)
