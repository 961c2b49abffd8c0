"""Gated output of an attention: x * sigmoid(gate), elementwise."""
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.models.cuda.tiles import empty_like

BLOCK, WARPS = 1024, 4


@triton.jit
def gate_forward(x_ptr, gate_ptr, y_ptr, count, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward(dy_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, count, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = at < count
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32))
    dx = dy * s
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + at, (dx * x * (1.0 - s)).to(dgate_ptr.dtype.element_ty), mask=mask)


class Gated(torch.autograd.Function):
    """x and gate of one shape -> x * sigmoid(gate) in the dtype of x, computed in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        y = empty_like(x)
        if y.numel():
            gate_forward[(triton.cdiv(y.numel(), BLOCK),)](
                x, gate, y, y.numel(), BLOCK, num_warps=WARPS, enable_fp_fusion=True
            )
        ctx.save_for_backward(x, gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        dx, dgate = empty_like(x), empty_like(gate)
        if dx.numel():
            gate_backward[(triton.cdiv(dx.numel(), BLOCK),)](
                dy.contiguous(), x, gate, dx, dgate, dx.numel(), BLOCK, num_warps=WARPS, enable_fp_fusion=True
            )
        return dx, dgate
