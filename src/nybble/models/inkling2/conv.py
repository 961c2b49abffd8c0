"""Short causal convolutions over the sequence, one filter a channel, on [B, S, C] without transposing."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.context import Context
from nybble.models.conv import causal_conv, lagged
from nybble.models.cpu import conv as fused
from nybble.models.cuda import on_gpu
from nybble.models.inkling2.residual import Source
from nybble.models.linear import Linear


class ShortConvolution(nn.Module):
    """Depthwise causal convolution of kernel K plus its input, over sqrt(K + 1): [B, S, C] -> [B, S, C].

    Computes in FP32. `slot` names the state it keeps in a generation cache.
    """

    def __init__(self, channels: int, kernel: int, layer: int, slot: int) -> None:
        super().__init__()
        self.layer, self.slot, self.kernel = layer, slot, kernel
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)  # holds the weight

    def taps(self) -> Tensor:
        """The weight [C, K], the last for the current token."""
        return self.conv1d.weight[:, 0]

    def forward(
        self,
        x: Tensor,
        context: Context,
        residual: Tensor | Source | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """In `dtype`, the input's by default, after `residual` [B, S, C] was added in FP32."""
        dtype, past = dtype or x.dtype, context.conv_state(x, self.layer, self.slot, self.kernel)
        if on_gpu(x):
            from nybble.models.cuda.conv import ShortConv

            graph = None
            if isinstance(residual, Source):
                graph, residual = residual.graph, residual.value.detach()
            if past is None:
                return ShortConv.apply(x, self.conv1d.weight, context.starts, residual, dtype, graph)
            line, starts, before = _behind(past, x, context.starts)
            residual, graph = (None if r is None else F.pad(r, (0, 0, before, 0)) for r in (residual, graph))
            return ShortConv.apply(line, self.conv1d.weight, starts, residual, dtype, graph)[:, before:]
        residual = residual.value if isinstance(residual, Source) else residual
        if past is None and by_hand_in_any_mode(x) and dtype == self.conv1d.weight.dtype == torch.float32:
            return _ShortConvolution.apply(x, self.conv1d.weight, residual, *context.same)
        y = causal_conv(x.float(), plain_taps(self.conv1d.weight), None, past, context.same)
        # rounded to the input's dtype first, as the published model does
        y = y.to(x.dtype)
        return (y if residual is None else residual.float() + y.float()).to(dtype)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, *same: Tensor) -> Tensor:
        taps = plain_taps(weight)
        ctx.save_for_backward(x, taps, *same)
        ctx.has_residual = residual is not None
        return fused.forward(x, taps, None, same, False, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, *same = ctx.saved_tensors
        dx, dtaps, _ = fused.backward(dy, x, taps, None, tuple(same), False)
        dweight = (dtaps / math.sqrt(len(taps) + 1)).flip(0).T[:, None]
        return dx, dweight, dy if ctx.has_residual else None, *(None for _ in same)


def _behind(past: Tensor, x: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """x [B, S, C] behind the tokens of a cache, where its documents start there, and how many those are.

    A GPU runs the same kernel with and without a cache, so that both give a token the same bits.
    """
    before = past.shape[1]
    starts = None if starts is None else F.pad(starts + before, (before, 0))
    return torch.cat([past, x], dim=1), starts, before


def plain_taps(weight: Tensor) -> Tensor:
    """FP32 [K, C] by lag, of the weight [C, 1, K] of a cross-correlation plus its input."""
    # the last tap of a cross-correlation weighs the current token: lag 0; there the input joins
    taps = weight.float()[:, 0].flip(-1).T
    identity = torch.zeros_like(taps)
    identity[0] = 1.0
    return (taps + identity) / math.sqrt(taps.shape[0] + 1)


class DynamicShortConvolution(nn.Module):
    """Short convolution whose taps are learned ones per channel plus ones computed per token and head.

    x [B, S, heads * D] and driver [B, S, H] -> [B, S, heads * D]. Tap index is the lag: row 0 weighs the
    current token.
    """

    def __init__(self, channels: int, hidden: int, heads: int, kernel: int, layer: int, slot: int) -> None:
        super().__init__()
        self.layer, self.slot, self.kernel, self.heads = layer, slot, kernel, heads
        self.static_weight = nn.Parameter(torch.zeros(kernel, channels))
        self.weight_proj = Linear(hidden, heads * kernel)

    def taps(self) -> Tensor:
        """The learned part [K, C], the first for the current token."""
        return self.static_weight

    def forward(self, x: Tensor, context: Context, driver: Tensor) -> Tensor:
        past = context.conv_state(x, self.layer, self.slot, self.kernel)
        dynamic = self.weight_proj(driver)
        if on_gpu(x):
            from nybble.models.cuda.conv_dynamic import DynamicConv

            if past is None:
                return DynamicConv.apply(x, self.static_weight, dynamic, context.starts)
            line, starts, before = _behind(past, x, context.starts)
            dynamic = F.pad(dynamic, (0, 0, before, 0))
            return DynamicConv.apply(line, self.static_weight, dynamic, starts)[:, before:]
        return plain_dynamic_convolution(x, self.static_weight, dynamic, past, context.same)


def plain_dynamic_convolution(
    x: Tensor, static: Tensor, dynamic: Tensor, past: Tensor | None, same: tuple[Tensor, ...]
) -> Tensor:
    """The same as a formula."""
    dtype, x = x.dtype, x.float()
    B, S, C = x.shape
    kernel = static.shape[0]
    heads = dynamic.shape[-1] // kernel
    dynamic = dynamic.float().view(B, S, heads, kernel)
    static = static.float().view(kernel, heads, C // heads)
    y = x.view(B, S, heads, C // heads) * (1.0 + static[0] + dynamic[..., :1])
    for lag in range(1, kernel):
        late = lagged(x, past, lag)
        if same:
            late = late * same[lag - 1]
        y = y + late.view(B, S, heads, C // heads) * (static[lag] + dynamic[..., lag, None])
    return (y.reshape(B, S, C) / math.sqrt(2 * kernel + 1)).to(dtype)
