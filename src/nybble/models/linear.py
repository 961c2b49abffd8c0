"""A linear layer whose FP32 master weight meets activations of any dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(torch.nn.Linear):
    """`nn.Linear` that computes in the dtype of its input: x [..., K] -> [..., N]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
