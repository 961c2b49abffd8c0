"""Short causal convolutions over the sequence, one filter a channel, on [B, S, C] without transposing."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from nybble.models.cpu import conv as fused
from nybble.models.inkling2.context import Context
from nybble.models.linear import Linear
from nybble.models.norms import by_hand


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, *same: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps, *same)
        return fused.forward(x, taps, same)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, *same = ctx.saved_tensors
        return *fused.backward(dy, x, taps, tuple(same)), *(None for _ in same)


def lagged(x: Tensor, past: Tensor | None, lag: int) -> Tensor:
    """x [B, S, C] delayed by `lag` tokens, filled from `past` [B, K-1, C] or with zeros."""
    B, S, C = x.shape
    head = x.new_zeros(B, lag, C) if past is None else past[:, past.shape[1] - lag :]
    return torch.cat([head, x], dim=1)[:, :S]


class ShortConvolution(nn.Module):
    """Depthwise causal convolution of kernel K plus its input, over sqrt(K + 1): [B, S, C] -> [B, S, C].

    Computes in FP32 and returns the input's dtype. `slot` names the state it keeps in a generation cache.
    """

    def __init__(self, channels: int, kernel: int, layer: int, slot: int) -> None:
        super().__init__()
        self.layer, self.slot, self.kernel = layer, slot, kernel
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)  # holds the weight

    def forward(self, x: Tensor, context: Context) -> Tensor:
        dtype, x = x.dtype, x.float()
        # the last tap of a cross-correlation weighs the current token: lag 0; there the residual joins
        taps = self.conv1d.weight.float()[:, 0].flip(-1).T
        identity = torch.zeros_like(taps)
        identity[0] = 1.0
        taps = (taps + identity) / math.sqrt(self.kernel + 1)
        past = context.conv_state(x, self.layer, self.slot, self.kernel)
        same = context.same
        if past is None and by_hand(x):
            return _ShortConv.apply(x, taps, *same)
        y = x * taps[0]
        for lag in range(1, self.kernel):
            late = lagged(x, past, lag)
            y = y + (late * same[lag - 1] if same else late) * taps[lag]
        return y.to(dtype)


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

    def forward(self, x: Tensor, context: Context, driver: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        B, S, C = x.shape
        past = context.conv_state(x, self.layer, self.slot, self.kernel)
        same = context.same
        dynamic = self.weight_proj(driver).float().view(B, S, self.heads, self.kernel)
        static = self.static_weight.float().view(self.kernel, self.heads, C // self.heads)
        y = x.view(B, S, self.heads, C // self.heads) * (1.0 + static[0] + dynamic[..., :1])
        for lag in range(1, self.kernel):
            late = lagged(x, past, lag)
            if same:
                late = late * same[lag - 1]
            y = y + late.view(B, S, self.heads, C // self.heads) * (static[lag] + dynamic[..., lag, None])
        return (y.reshape(B, S, C) / math.sqrt(2 * self.kernel + 1)).to(dtype)
