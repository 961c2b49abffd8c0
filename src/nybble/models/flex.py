"""FlexAttention (arXiv 2412.05496): masks of documents and windows, and how it is called."""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(S: int, window: int | None, segments: Tensor | None, B: int, device: torch.device) -> Any:
    """FlexAttention's mask of a causal, windowed, document-wise attention over S tokens."""
    if segments is None and not torch.compiler.is_compiling():
        return _same_for_all(S, window, device)
    return _block_mask(S, window, segments, B, device)


@lru_cache(maxsize=16)
def _same_for_all(S: int, window: int | None, device: torch.device) -> Any:
    return _block_mask(S, window, None, 1, device)


def _block_mask(S: int, window: int | None, segments: Tensor | None, B: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        ok = i >= j
        if window is not None:
            ok = ok & (i - j < window)
        if segments is not None:
            ok = ok & (segments[b, i] == segments[b, j])
        return ok

    return create_block_mask(allowed, B if segments is not None else None, None, S, S, device=str(device))


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, **more: Any) -> Any:
    """FlexAttention of q [B, H, S, D] on k, v [B, h, S, D], compiled where it is not already.

    On a CPU this runs its slow eager form, for tests.
    """
    from torch.nn.attention.flex_attention import flex_attention

    plain = torch.compiler.is_compiling() or q.device.type == "cpu"
    attend: Any = flex_attention if plain else _compiled_flex()
    with warnings.catch_warnings():
        if not torch.compiler.is_compiling():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, **more)
