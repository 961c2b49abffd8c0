"""The attention of `attend.py` through FlexAttention (arXiv 2412.05496)."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(S: int, window: int | None, segments: Tensor | None, B: int, device: torch.device) -> Any:
    """FlexAttention's mask of a causal, windowed, document-wise attention over S tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        ok = i >= j
        if window is not None:
            ok = ok & (i - j < window)
        if segments is not None:
            ok = ok & (segments[b, i] == segments[b, j])
        return ok

    return create_block_mask(allowed, B if segments is not None else None, None, S, S, device=str(device))


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, proj: Tensor, sink: Tensor, *, scale: float, mask: Any
) -> Tensor:
    """The formula of `attend.py` through FlexAttention, for S = T; `mask` is a `block_mask`.

    On a CPU this runs FlexAttention's slow eager form, for tests.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    extent = proj.shape[1]
    bias = (rel @ proj.to(rel.dtype)).transpose(1, 2).contiguous()  # [B, H, S, extent]

    def add_bias(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i - j
        near = (distance >= 0) & (distance < extent)
        return score + torch.where(near, bias[b, head, i, distance.clamp(0, extent - 1)], 0.0)

    compiled = torch.compiler.is_compiling() or q.device.type == "cpu"
    flex: Any = flex_attention if compiled else _compiled_flex()
    with warnings.catch_warnings():
        if not torch.compiler.is_compiling():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = flex(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=add_bias,
            block_mask=mask,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    keep = torch.sigmoid(
        aux.lse - sink.float().transpose(1, 2)
    )  # the sink's value is zero: it only takes mass away
    return (out * keep[..., None].to(out.dtype)).transpose(1, 2)
