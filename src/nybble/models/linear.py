"""A linear layer whose FP32 master weight meets activations of any dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels.cpu.product import matmul
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.direct import by_hand


class Linear(torch.nn.Linear):
    """`nn.Linear` that computes in the dtype of its input: x [..., K] -> [..., N]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if by_hand(x) and by_hand(self.weight):
            y: Tensor = _ByTiles.apply(x.reshape(-1, x.shape[-1]), self.weight)
            y = y.view(*x.shape[:-1], y.shape[-1])
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class _ByTiles(torch.autograd.Function):
    """x [T, K] and weight [N, K] -> x @ weight.T, by products of our own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.T, fresh(len(x), len(weight)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        return (
            matmul(dy, weight, fresh(*x.shape)) if need_x else None,
            matmul(dy.T, x, fresh(*weight.shape)) if need_weight else None,
        )
