"""Causal depthwise convolution over the sequence on [B, S, C], without transposing; tap l weighs lag l."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels.cpu.scratch import copied
from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import conv as fused


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, silu: bool, *same: Tensor) -> Tensor:
        x = copied(x)  # of a slice: once, not in both directions
        ctx.save_for_backward(x, taps, bias, *same)
        ctx.silu = silu
        return fused.forward(x, taps, bias, same, silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, bias, *same = ctx.saved_tensors
        return *fused.backward(dy, x, taps, bias, tuple(same), ctx.silu), None, *(None for _ in same)


def lagged(x: Tensor, past: Tensor | None, lag: int) -> Tensor:
    """x [B, S, C] delayed by `lag` tokens, filled from `past` [B, K-1, C] or with zeros."""
    B, S, C = x.shape
    head = x.new_zeros(B, lag, C) if past is None else past[:, past.shape[1] - lag :]
    return torch.cat([head, x], dim=1)[:, :S]


def causal_conv(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    same: tuple[Tensor, ...],
    silu: bool = False,
) -> Tensor:
    """y_t = bias + the sum of taps[l] * x_{t-l} over lags l whose token is of the same document.

    Args:
        x: [B, S, C] FP32.
        taps: [K, C] FP32.
        bias: [C] FP32 or None.
        past: the K-1 inputs before x, [B, K-1, C], or None for zeros.
        same: for each lag 1..K-1 [B, S, 1], see `Context.same`; empty for one document.
        silu: whether to return y * sigmoid(y) in place of y.

    Returns:
        [B, S, C] FP32.
    """
    if by_hand_in_any_mode(x):
        if past is None:
            return _CausalConv.apply(x, taps, bias, silu, *same)
        # the same kernel with and without a cache, so that both give a token the same bits
        before = past.shape[1]
        line = torch.cat([past, x], dim=1)
        masks = (F.pad(m, (0, 0, before, 0)) for m in same)
        return _CausalConv.apply(line, taps, bias, silu, *masks)[:, before:]
    y = x * taps[0] if bias is None else x * taps[0] + bias
    for lag in range(1, taps.shape[0]):
        late = lagged(x, past, lag)
        y = y + (late * same[lag - 1] if same else late) * taps[lag]
    return F.silu(y) if silu else y
