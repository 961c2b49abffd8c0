"""The passes of routed experts in plain torch, on any device; `fused_experts.py` has the same for GPUs.

Legend and products: see `experts.py`.
"""

from typing import Any

import torch
from torch import Tensor

from nybble.formats import Operand as Role
from nybble.layers import folded, gemm, kept
from nybble.layers.casting import cast
from nybble.layers.expert_pass import Plan
from nybble.layers.operand import Values, compute_dtype, ends_of, outer, product
from nybble.layers.routing import Route, combine
from nybble.layers.weights import Spec
from nybble.recipes import Operand


class PlainExperts(torch.autograd.Function):
    """`x, weights, w_up, w_down, ...` of `Experts.compute` to its result [T, H]."""

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
        routed, groups = Route(order, ends, plan.k), ends.shape[0]
        spec = plan.up.spec
        dtype = compute_dtype(x.device, spec.gemms.fprop.x, spec.gemms.fprop.w, "rows", groups)
        # x is quantised once a token, before it is copied to its k rows: with an outer scale a token, or
        # none, that gives the same codes.
        draw = spec.draw(Role.FPROP_X, key)._replace(rows=rows)
        values, saved_x = kept.keep(x, spec.gemms, plan.keep_x, dtype, draw, plan.arrived)
        w = plan.up.fprop(w_up, weight_key, dtype)
        gate_up = _rows_product(values, routed, spec.gemms.fprop.x, w, spec, x.dtype)
        h = plan.activation(gate_up)
        spec = plan.down.spec
        dtype = compute_dtype(x.device, spec.gemms.fprop.x, spec.gemms.fprop.w, "rows", groups)
        draw = spec.draw(Role.FPROP_X, key)._replace(rows=routed.draw_rows(rows))
        (h_values, h_amax), saved_h = kept.keep(h, spec.gemms, plan.keep_h, dtype, draw)
        w = plan.down.fprop(w_down, weight_key, dtype)
        out = gemm.grouped_rows(h_values, w.values, ends, True)
        # The epilogue's scale and the routing weight are one factor a row.
        scale = _row_scale(h_amax, spec.gemms.fprop.x, w.amax, spec.gemms.fprop.w, routed)
        factor = product(weights.reshape(-1)[routed.pair()].float(), scale)
        y = combine(out, factor, routed.place(), plan.k, x.dtype)
        saved = [*saved_x, *saved_h, *([gate_up] if plan.keep_gate_up else [])]
        ctx.save_for_backward(weights, w_up, w_down, order, ends, rows, key, weight_key, *saved)
        ctx.plan, ctx.counts = plan, (len(saved_x), len(saved_h))
        ctx.shapes, ctx.dtype = (x.shape, h.shape), x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, w_up, w_down, order, ends, rows, key, weight_key, *saved = ctx.saved_tensors
        plan: Plan = ctx.plan
        routed, groups = Route(order, ends, plan.k), ends.shape[0]
        n, m = ctx.counts
        saved_x, saved_h = saved[:n], saved[n : n + m]
        x_shape, h_shape = ctx.shapes
        need_x, need_weights, need_up, need_down = ctx.needs_input_grad[:4]
        token, pairs, place = routed.token(), routed.draw_rows(rows), routed.place()
        factor = weights.reshape(-1)[routed.pair()].float().unsqueeze(-1)
        dx = dweights = dw_up = dw_down = None
        spec = plan.down.spec
        codes = None
        if need_down and spec.gemms.folds:
            # GEMM wgrad of down: dy[R,H].T @ (w * h)[R,I], on the codes of dgrad
            draw = spec.draw(Role.DGRAD_DY, key)._replace(rows=rows)
            by_pair = weights.reshape(-1).float()
            codes = folded.gradient(dy, spec.gemms.dgrad.dy, draw, order, plan.k, by_pair)
            dw_down = _wgrad(dy, saved_h, h_shape, spec, key, pairs, ends, w_down.dtype, None, codes, token)
        elif need_down:
            # GEMM wgrad of down: (w * dy)[R,H].T @ h[R,I] -> dWdown[E,H,I]
            dy_rows = (dy.index_select(0, token).float().mul_(factor)).to(dy.dtype)
            dw_down = _wgrad(dy_rows, saved_h, h_shape, spec, key, pairs, ends, w_down.dtype)
            del dy_rows
        if need_x or need_weights or need_up:
            # GEMM dgrad of down: dy[R,H] @ Wdown[E,H,I] -> g[R,I], before the routing weight, so that dy is
            # quantised once a token.
            dgrad = spec.gemms.dgrad
            dtype = compute_dtype(dy.device, dgrad.dy, dgrad.w, "rows", groups)
            if codes is not None:
                values = codes.along(dgrad.dy, dtype)
            else:
                values = cast(dy, dgrad.dy, -1, dtype, spec.draw(Role.DGRAD_DY, key)._replace(rows=rows))
            w = plan.down.dgrad(w_down, weight_key, dtype)
            g = _rows_product(values, routed, dgrad.dy, w, spec, torch.float32, dgrad=True)
            if need_weights:
                # dL/dw[r] = <dy, out[r]> = <dy, h[r] @ Wdown.T> = <dy @ Wdown, h[r]> = <g[r], h[r]>: the
                # outputs of the experts need not be kept.
                draw = spec.draw(Role.FPROP_X, key)._replace(rows=pairs)
                h = kept.fprop_again(saved_h, spec.gemms, h_shape, torch.float32, draw, full=True).values
                dweights = (g * h).sum(-1)[place].view(weights.shape).to(weights.dtype)
                del h
        if need_x or need_up:
            spec = plan.up.spec
            if plan.keep_gate_up:
                gate_up = saved[-1]
            else:
                fprop = spec.gemms.fprop
                dtype = compute_dtype(dy.device, fprop.x, fprop.w, "rows", groups)
                draw = spec.draw(Role.FPROP_X, key)._replace(rows=rows)
                values = kept.fprop_again(saved_x, spec.gemms, x_shape, dtype, draw)
                w = plan.up.fprop(w_up, weight_key, dtype)
                gate_up = _rows_product(values, routed, fprop.x, w, spec, ctx.dtype)
            d_up = plan.activation.backward(gate_up, g.mul_(factor)).to(dy.dtype)
            del gate_up, g
            shared = codes = None
            draw = spec.draw(Role.DGRAD_DY, key)._replace(rows=pairs)
            if need_up and spec.gemms.folds:
                codes = folded.gradient(d_up, spec.gemms.dgrad.dy, draw)
            if need_x:
                # GEMM dgrad of up: d_up[R,2I] @ Wup[E,2I,H] -> dx[R,H], then the sum over a token's k rows
                dgrad = spec.gemms.dgrad
                dtype = compute_dtype(dy.device, dgrad.dy, dgrad.w, "rows", groups)
                if codes is not None:
                    values = codes.along(dgrad.dy, dtype)
                else:
                    values = cast(d_up, dgrad.dy, -1, dtype, draw)
                shared = values if spec.shares_dy else None
                w = plan.up.dgrad(w_up, weight_key, dtype)
                scale = _row_scale(values.amax, dgrad.dy, w.amax, dgrad.w, routed)
                dx = combine(
                    gemm.grouped_rows(values.values, w.values, ends, False), scale, place, plan.k, ctx.dtype
                )
            if need_up:
                # GEMM wgrad of up: d_up[R,2I].T @ x[R,H] -> dWup[E,2I,H]
                x_rows = kept.take(saved_x, spec.gemms, token)
                shape = (token.shape[0], x_shape[1])
                dw_up = _wgrad(d_up, x_rows, shape, spec, key, pairs, ends, w_up.dtype, shared, codes)
        return dx, dweights, dw_up, dw_down, None, None, None, None, None, None


def _rows_product(
    a: Values, routed: Route, a_spec: Operand, w: Values, spec: Spec, dtype: torch.dtype, dgrad: bool = False
) -> Tensor:
    """Product of each row's token with its expert's matrix, from values of the T tokens: [R, N] in
    `dtype`."""
    token = routed.token()
    amax = a.amax[token] if a_spec.outer == "row" else a.amax
    out = gemm.grouped_rows(a.values.index_select(0, token), w.values, routed.ends, not dgrad)
    w_spec = spec.gemms.dgrad.w if dgrad else spec.gemms.fprop.w
    return gemm.scaled(out, _row_scale(amax, a_spec, w.amax, w_spec, routed)).to(dtype)


def _row_scale(
    a_amax: Tensor, a_spec: Operand, w_amax: Tensor, w_spec: Operand, routed: Route
) -> Tensor | None:
    """Outer scale of each row [R] (or of all, []), from those of the row and of its expert's matrix."""
    w_scale = outer(w_amax, w_spec)
    if w_scale is not None and w_scale.dim():
        w_scale = w_scale[routed.expert()]
    return product(outer(a_amax, a_spec), w_scale)


def _wgrad(
    dy: Tensor,
    saved: kept.Saved,
    shape: tuple[int, ...],
    spec: Spec,
    key: Tensor,
    pairs: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    shared: Values | None = None,
    codes: folded.Gradient | None = None,
    token: Tensor | None = None,
) -> Tensor:
    """dy[R,N].T @ x[R,K] over each expert's rows: [E, N, K].

    Where dy is in `codes` its row r is row token[r] of them, or row r.
    """
    wgrad = spec.gemms.wgrad
    compute = compute_dtype(dy.device, wgrad.dy, wgrad.x, "columns", ends.shape[0])
    if codes is not None:
        a, a_amax = codes.across(wgrad.dy, compute, ends, token)
    else:
        draw = spec.draw(Role.WGRAD_DY, key)._replace(rows=pairs)
        a, a_amax = cast(dy, wgrad.dy, -2, compute, draw, ends) if shared is None else shared
    draw = spec.draw(Role.WGRAD_X, key)._replace(rows=pairs)
    factor = None if codes is None else codes.factor
    b, b_amax = kept.wgrad_operand(saved, spec.gemms, shape, compute, draw, ends, factor)
    scale = product(outer(a_amax, wgrad.dy), outer(b_amax, wgrad.x))
    ends = ends_of(ends, wgrad.x)
    out = gemm.grouped_columns(a, b, ends, dtype if scale is None else torch.float32)
    return out if scale is None else (out * (scale[:, None, None] if scale.dim() else scale)).to(dtype)
