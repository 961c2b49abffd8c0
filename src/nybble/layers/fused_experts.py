"""The passes of routed experts on a GPU: those of `experts.py` with everything between the products fused.

Same products, operands and draws. What differs from the passes in plain torch is arithmetic that no recipe
names: a SwiGLU computes in FP32 and rounds its result to BF16 once. Legend and products: see `experts.py`.
"""

from typing import Any

import torch
from torch import Tensor

from nybble import formats
from nybble.kernels import fused
from nybble.layers import gemm
from nybble.layers.expert_gradients import Gradients
from nybble.layers.expert_pass import Pass, Plan
from nybble.layers.operand import FP8, compute_dtype
from nybble.layers.routing import Route

BF16 = torch.bfloat16


def fits(x: Tensor, plan: Plan, experts: int) -> bool:
    """Whether these passes serve: BF16 on a GPU, a SwiGLU, products on dequantised operands."""
    if x.device.type != "cuda" or x.dtype != BF16 or plan.activation.caps is None or x.shape[1] % 16:
        return False
    for spec in (plan.up.spec, plan.down.spec):
        fprop, dgrad, wgrad = spec.gemms.fprop, spec.gemms.dgrad, spec.gemms.wgrad
        if compute_dtype(x.device, fprop.x, fprop.w, "rows", experts) != BF16:
            return False
        pairs = ((dgrad.dy, dgrad.w, "rows"), (wgrad.dy, wgrad.x, "columns"))
        if any(compute_dtype(x.device, a, b, grouped, experts) not in (BF16, FP8) for a, b, grouped in pairs):
            return False
        if formats.get(fprop.x.format).scale == "fp32":  # its values are not exact in BF16
            return False
    return True


class FusedExperts(torch.autograd.Function):
    """Takes and returns what the passes of `experts.py` do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        order: Tensor,
        ends: Tensor,
        rows: Tensor | None,
        key: Tensor,
        weight_key: Tensor,
        plan: Plan,
    ) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()  # no second name of one tensor, as in `kept.keep`
        run = Pass(plan, Route(order, ends, plan.k), weights, rows, key, weight_key)
        saved_x, x_rows, x_amax = run.enter(x)
        gate_up, factor = run.up(x_rows, x_amax, w_up)
        saved_h, h, h_amax = run.activate(gate_up, factor)
        fprop = plan.down.spec.gemms.fprop
        out, w_amax = run.multiply(h, plan.down, w_down)
        # The epilogue's scale and the routing weight are one factor a row.
        scale = run.factors(h_amax, fprop.x, "row", w_amax, fprop.w, run.weights)
        y: Tensor = fused.combine_rows(out, scale, run.place, ends, plan.k)
        saved = [*saved_x, *saved_h, *([gate_up] if plan.keep_gate_up else [])]
        ctx.save_for_backward(weights, w_up, w_down, order, ends, rows, key, weight_key, factor, *saved)
        ctx.plan, ctx.counts = plan, (len(saved_x), len(saved_h))
        ctx.shapes = (x.shape, h.shape)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, w_up, w_down, order, ends, rows, key, weight_key, factor, *saved = ctx.saved_tensors
        plan: Plan = ctx.plan
        dy = dy.contiguous()
        run = Gradients(plan, Route(order, ends, plan.k), weights, rows, key, weight_key)
        n, m = ctx.counts
        saved_x, saved_h = saved[:n], saved[n : n + m]
        x_shape, h_shape = ctx.shapes
        need_x, need_weights, need_up, need_down = ctx.needs_input_grad[:4]
        dx = dweights = dw_up = dw_down = None
        spec = plan.down.spec
        # dy is quantised a token for dgrad, before its routing weight. For wgrad it is rounded a row, behind
        # the weight, unless wgrad takes the codes of dgrad: then the weight goes into h.
        a, b, x_factor = run.split_dy(dy, need_x or need_weights or need_up, need_down)
        if b is not None:
            # GEMM wgrad of down: (w * dy)[R,H].T @ h[R,I] -> dWdown[E,H,I]
            dw_down = run.wgrad(b, saved_h, h_shape, spec, None, w_down.dtype, x_factor)
            del b
        if a is not None:
            # GEMM dgrad of down: dy[R,H] @ Wdown[E,H,I] -> g[R,I]
            dgrad = spec.gemms.dgrad
            w = plan.down.dgrad(w_down, weight_key, run.dgrad_dtype(spec))
            g = gemm.grouped_rows(a.values, w.values, ends, False, clear=False)
            g_factor = run.factors(a.amax, dgrad.dy, "token", w.amax, dgrad.w)
            del a, w
            need_gate_up = need_x or need_up
            gate_up = saved[-1] if plan.keep_gate_up else g.new_empty(0, 2 * g.shape[1])
            if need_gate_up and not plan.keep_gate_up:
                gate_up, _ = run.up(*run.enter_again(saved_x, x_shape), w_up, factor)
            # dL/dw[r] = <g[r], h[r]>: the outputs of the experts need not be kept.
            h = run.full_h(saved_h, h_shape) if need_weights else []
            (a, b, x_factor), dots = run.gate_gradients(gate_up, factor, g, g_factor, h, need_x, need_up)
            del g, gate_up
            dweights = dots.view(weights.shape).to(weights.dtype) if need_weights else None
            spec = plan.up.spec
            if a is not None:
                # GEMM dgrad of up: d_up[R,2I] @ Wup[E,2I,H] -> dx[R,H], then the sum over a token's k rows
                dgrad = spec.gemms.dgrad
                w = plan.up.dgrad(w_up, weight_key, run.dgrad_dtype(spec))
                scale = run.factors(a.amax, dgrad.dy, "row", w.amax, dgrad.w)
                dx_rows = gemm.grouped_rows(a.values, w.values, ends, False, clear=False)
                del a, w
                dx = fused.combine_rows(dx_rows, scale, run.place, ends, plan.k)
                del dx_rows
            if b is not None:
                # GEMM wgrad of up: d_up[R,2I].T @ x[R,H] -> dWup[E,2I,H]
                shape = (order.shape[0], x_shape[1])
                dw_up = run.wgrad(b, saved_x, shape, spec, run.token, w_up.dtype, x_factor)
        return dx, dweights, dw_up, dw_down, None, None, None, None, None, None
