"""Routed experts whose GEMMs take the operands that a recipe names.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width, R = T * k routed rows, sorted by
expert.
    up    gate_up[R,2I] = x[R,H] @ Wup[E,2I,H].T        h = act(gate_up)
    down  out[R,H]      = h[R,I] @ Wdown[E,H,I].T       y[t] = sum over its k rows of w[r] * out[r]
Rows of one expert are one group: blocks along T never span two experts.
"""

import copyreg
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nybble.formats import Operand as Role
from nybble.kernels.cpu.rows import sort
from nybble.layers import gemm, kept
from nybble.layers.activation import Activation
from nybble.layers.experts_by_hand import ExpertsByHand, by_hand
from nybble.layers.fused_experts import FusedExperts, Plan, fits
from nybble.layers.linear import planned
from nybble.layers.operand import Codes, Values, cast, compute_dtype, ends_of, outer, product
from nybble.layers.routing import Route, combine, route
from nybble.layers.step import StepState
from nybble.layers.weights import Spec, Weight, WeightCache
from nybble.recipes import Operand

DOWN = 8
"""Added to the operand numbers of the down product, so that its draws are not those of the up product."""


class Exchange(Protocol):
    """Takes tokens to the experts of other ranks and brings the results back; see `nybble.parallel`."""

    def specs(self, up: Spec, down: Spec) -> tuple[Spec, Spec]:
        """The precision of products whose operands may arrive quantised."""
        ...

    def __call__(
        self,
        experts: "Experts",
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor: ...


class Gather(Protocol):
    """Brings together the weights of experts of which ranks hold parts; see `nybble.parallel`."""

    def __call__(self, experts: "Experts", part: Tensor, which: int) -> tuple[Tensor, Codes]:
        """(the shape of a weight whose gradient goes to those who hold it, the codes of its operand of
        fprop); `part` is what is held here of the first weight (0) or the second (1)."""
        ...


class Experts(nn.Module):
    """Fused experts with the GEMMs of a recipe; `convert` mixes it into the model's own class."""

    down_proj: nn.Parameter
    specs: tuple[Spec, Spec]
    step_state: StepState
    weight_caches: tuple[WeightCache, WeightCache]
    keep: str
    """"recompute" or "activations"."""
    exchange: Exchange | None = None
    """Where other ranks have experts of this module too."""
    first_expert: int = 0
    """Experts on ranks before this one."""
    gather: Gather | None = None
    """Where ranks hold parts of the weights that this one computes with."""

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        rows: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k]; an index of E or more is an expert that is not here, and adds nothing.
            top_k_weights: [T, k].
            rows: int64 [T], what each token counts as in random draws; its index in the batch when None.
            meanwhile: work of the caller, done while tokens travel to other ranks, if they do.
        Returns:
            [T, H] in the dtype of hidden_states, summed in FP32.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = self.step_state.rows(x.shape[0], x.device) if rows is None else rows
        if self.exchange is None:
            y = self.compute(x, top_k_index, top_k_weights, rows)
            if meanwhile is not None:
                meanwhile()
        else:
            y = self.exchange(self, x, top_k_index, top_k_weights, rows, meanwhile)
        return y if y.shape == hidden_states.shape else y.view(hidden_states.shape)  # FSDP warns of views

    def compute(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        rows: Tensor | None,
        arrived: Codes | None = None,
    ) -> Tensor:
        """The same by the experts that are here.

        Args:
            x: [T, H].
            rows: int64 [T], what each token counts as in random draws; its own index when None.
            arrived: codes of x as the operand of fprop, where x came as those; x is then only a shape.
        """
        up, down = local(getattr(self, up_name(self))), local(self.down_proj)
        if arrived is None and self._rounds_by_hand(x, up):
            sorted_rows = sort(top_k_index, up.shape[0])
            act = self.by_pass()  # type: ignore[operator]  # of the model's own class
            out: Tensor = ExpertsByHand.apply(
                x, top_k_weights, up, down, *sorted_rows, act, True, self.keep == "activations"
            )
            return out
        up_codes = down_codes = None
        if self.gather is not None:
            (up, up_codes), (down, down_codes) = self.gather(self, up, 0), self.gather(self, down, 1)
        grad = torch.is_grad_enabled()
        recompute = self.keep == "recompute" and kept.repeatable(x, self.specs[0].gemms)
        plan = Plan(
            up=self._planned(up, 0)._replace(codes=up_codes),
            down=self._planned(down, 1)._replace(codes=down_codes),
            activation=Activation(self),
            k=top_k_index.shape[-1],
            keep_x=grad and (up.requires_grad or recompute),
            keep_h=grad and (down.requires_grad or top_k_weights.requires_grad),
            keep_gate_up=grad and not recompute,
            arrived=arrived,
        )
        order, ends, _ = route(top_k_index, up.shape[0])
        key, weight_key = self.step_state.keys(x.device)
        passes = FusedExperts if fits(x, plan, up.shape[0]) else _Experts
        y: Tensor = passes.apply(x, top_k_weights, up, down, order, ends, rows, key, weight_key, plan)
        return y

    def _rounds_by_hand(self, x: Tensor, up: Tensor) -> bool:
        """Whether all of it is plain BF16 on a CPU and all experts are here."""
        here = self.exchange is None and self.gather is None
        plain = up.dtype == torch.float32 and all(spec.rounds_to_bf16 for spec in self.specs)
        return here and plain and hasattr(self, "by_pass") and x.numel() > 0 and by_hand(x)

    def _planned(self, weight: Tensor, which: int) -> Weight:
        first = self.first_expert * weight[0].numel() if self.first_expert else 0
        return planned(weight, self.specs[which], self.weight_caches[which], self.step_state, first)

    def extra_repr(self) -> str:
        return " ".join(self.specs[0].gemms.texts())

    def __reduce__(self) -> Any:
        # The class of a converted module is made at run time: it is found again from the model's own.
        return _rebuild, (type(self).__bases__[1],), self.__dict__


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward pass of Experts; isinstance checks against it still hold."""
    if original not in _CLASSES:
        _CLASSES[original] = type(original.__name__, (Experts, original), {"__module__": original.__module__})
    return _CLASSES[original]


def _rebuild(original: type[nn.Module]) -> Any:
    return copyreg.__newobj__(experts_class(original))  # type: ignore[attr-defined]


def up_name(module: nn.Module) -> str:
    """Name of the first weight: gated experts have gate_up_proj, others up_proj."""
    return "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"


def local(weight: Tensor) -> Tensor:
    """The part of a distributed weight that is here; a plain weight as it is."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


class _Experts(torch.autograd.Function):
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
        keys = (key.clone(), weight_key.clone())
        ctx.save_for_backward(weights, w_up, w_down, order, ends, rows, *keys, *saved)
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
        if need_down:
            # GEMM wgrad of down: (w * dy)[R,H].T @ h[R,I] -> dWdown[E,H,I]
            dy_rows = (dy.index_select(0, token).float().mul_(factor)).to(dy.dtype)
            dw_down = _wgrad(dy_rows, saved_h, h_shape, spec, key, pairs, ends, w_down.dtype)
            del dy_rows
        if need_x or need_weights or need_up:
            # GEMM dgrad of down: dy[R,H] @ Wdown[E,H,I] -> g[R,I], before the routing weight, so that dy is
            # quantised once a token.
            dgrad = spec.gemms.dgrad
            dtype = compute_dtype(dy.device, dgrad.dy, dgrad.w, "rows", groups)
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
            shared = None
            if need_x:
                # GEMM dgrad of up: d_up[R,2I] @ Wup[E,2I,H] -> dx[R,H], then the sum over a token's k rows
                dgrad = spec.gemms.dgrad
                dtype = compute_dtype(dy.device, dgrad.dy, dgrad.w, "rows", groups)
                draw = spec.draw(Role.DGRAD_DY, key)._replace(rows=pairs)
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
                dw_up = _wgrad(d_up, x_rows, shape, spec, key, pairs, ends, w_up.dtype, shared)
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
) -> Tensor:
    """dy[R,N].T @ x[R,K] over each expert's rows: [E, N, K]."""
    wgrad = spec.gemms.wgrad
    compute = compute_dtype(dy.device, wgrad.dy, wgrad.x, "columns", ends.shape[0])
    draw = spec.draw(Role.WGRAD_DY, key)._replace(rows=pairs)
    a, a_amax = cast(dy, wgrad.dy, -2, compute, draw, ends) if shared is None else shared
    draw = spec.draw(Role.WGRAD_X, key)._replace(rows=pairs)
    b, b_amax = kept.wgrad_operand(saved, spec.gemms, shape, compute, draw, ends)
    scale = product(outer(a_amax, wgrad.dy), outer(b_amax, wgrad.x))
    ends = ends_of(ends, wgrad.x)
    out = gemm.grouped_columns(a, b, ends, dtype if scale is None else torch.float32)
    return out if scale is None else (out * (scale[:, None, None] if scale.dim() else scale)).to(dtype)
