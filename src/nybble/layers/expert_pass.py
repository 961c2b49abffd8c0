"""The steps between the products of `fused_experts.py`: operands made, kept, made again and scaled."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nybble import formats
from nybble.formats import Operand as Role
from nybble.kernels import fused, hopper
from nybble.layers import gemm, kept
from nybble.layers.activation import Activation
from nybble.layers.operand import (
    FP8,
    Codes,
    Draw,
    Values,
    cast,
    compute_dtype,
    ends_of,
    one_read,
    outer,
    product,
)
from nybble.layers.routing import Route
from nybble.layers.weights import Spec, Weight
from nybble.recipes import GemmTable, Operand

BF16 = torch.bfloat16


class Plan(NamedTuple):
    """What a pass needs besides tensors."""

    up: Weight
    down: Weight
    activation: Activation
    k: int
    keep_x: bool
    keep_h: bool
    keep_gate_up: bool
    """False: it is not needed, or computed again in the backward pass."""
    arrived: Codes | None
    """Codes of x as the operand of fprop, where x came as those."""


class Pass:
    """Routing, draws and plan of one pass, and the steps between its products."""

    def __init__(
        self, plan: Plan, routed: Route, weights: Tensor, rows: Tensor | None, key: Tensor, weight_key: Tensor
    ) -> None:
        assert plan.activation.caps is not None
        self.plan, self.routed, self.rows, self.key, self.weight_key = plan, routed, rows, key, weight_key
        self.caps = plan.activation.caps
        self.order, self.ends = routed.order, routed.ends
        self.weights = weights.reshape(-1).float()
        drawn = not (plan.up.spec.rounds_to_bf16 and plan.down.spec.rounds_to_bf16)
        self.token, self.place, pairs = fused.row_facts(routed.order, plan.k, rows, drawn)
        self.pairs: Tensor | None = pairs if drawn else None
        """What each row counts as in random draws."""

        self._tiles: tuple[Tensor, Tensor] | None = None

    @property
    def tiles(self) -> tuple[Tensor, Tensor]:
        """What passes along each expert's rows share; see `expert_columns.token_tiles`."""
        if self._tiles is None:
            self._tiles = fused.token_tiles(self.ends, self.order.shape[0])
        return self._tiles

    def dgrad_dtype(self, spec: Spec) -> torch.dtype:
        """In which the operands of dgrad are multiplied."""
        dgrad = spec.gemms.dgrad
        return compute_dtype(self.ends.device, dgrad.dy, dgrad.w, "rows", len(self.ends))

    def wgrad_dtype(self, spec: Spec) -> torch.dtype:
        """The same of wgrad."""
        wgrad = spec.gemms.wgrad
        return compute_dtype(self.ends.device, wgrad.dy, wgrad.x, "columns", len(self.ends))

    def factors(
        self,
        amax: Tensor,
        spec: Operand,
        per: str,
        w_amax: Tensor,
        w_spec: Operand,
        weights: Tensor | None = None,
    ) -> Tensor | None:
        """Outer scale of each row, times its routing weight; None where it is 1."""
        scaled, w_scaled = (formats.get(s.format).two_level for s in (spec, w_spec))
        if not scaled and not w_scaled and weights is None:
            return None
        per = per if spec.outer == "row" else "one"
        out: Tensor = fused.row_factors(
            self.order, self.ends, self.plan.k, amax if scaled else None, spec.format, per,
            w_amax if w_scaled else None, w_spec.format, weights,
        )  # fmt: skip
        return out

    def enter(self, x: Tensor) -> tuple[kept.Saved, Tensor, Tensor]:
        """(what is kept of x [T, H], values of its rows [R, H], amax): quantised once a token."""
        spec = self.plan.up.spec
        draw = spec.draw(Role.FPROP_X, self.key)
        if _coded(spec.gemms):
            fx = spec.gemms.fprop.x
            if (arrived := self.plan.arrived) is not None:
                values = fused.decode_to_rows(*arrived, fx.format, self.token)
                return list(arrived) if self.plan.keep_x else [], values, arrived.amax
            key = self.key if fx.rounding == "stochastic" else None
            *codes, values = fused.quantize_to_rows(
                x, fx.format, fx.rounding, key, draw.layer, draw.operand, self.rows, self.place
            )
            return codes if self.plan.keep_x else [], values, codes[2]
        draw = draw._replace(rows=self.rows)
        (values, amax), saved = kept.keep(x, spec.gemms, self.plan.keep_x, BF16, draw, self.plan.arrived)
        return saved, fused.gather_rows(values, self.token, None), amax

    def enter_again(self, saved: kept.Saved, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(values of the rows of x, amax) from what was kept."""
        spec = self.plan.up.spec
        if _coded(spec.gemms):
            return fused.decode_to_rows(*saved, spec.gemms.fprop.x.format, self.token), saved[2]
        draw = spec.draw(Role.FPROP_X, self.key)._replace(rows=self.rows)
        values, amax = kept.fprop_again(saved, spec.gemms, shape, BF16, draw)
        return fused.gather_rows(values, self.token, None), amax

    def up(
        self, values: Tensor, amax: Tensor, weight: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(gate and up [R, 2I] without their scale, that scale)."""
        fprop = self.plan.up.spec.gemms.fprop
        gate_up, w_amax = self.multiply(values, self.plan.up, weight)
        return gate_up, factor if factor is not None else self.factors(
            amax, fprop.x, "token", w_amax, fprop.w
        )

    def multiply(self, values: Tensor, operand: Weight, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(fprop of rows with their experts' matrices, without scales; amax of those), on codes where that is
        what is kept of them and rows are few."""
        if gemm.few_rows(values, len(self.ends)):
            codes = operand.fprop_codes(weight, self.weight_key)
            if codes is not None:
                return gemm.rows_times_codes(values, codes.codes, codes.scales, self.ends), codes.amax
        w = operand.fprop(weight, self.weight_key, BF16)
        return gemm.grouped_rows(values, w.values, self.ends, True, clear=False), w.amax

    def activate(self, gate_up: Tensor, factor: Tensor | None) -> tuple[kept.Saved, Tensor, Tensor]:
        """(what is kept of h [R, I], its values, amax)."""
        spec = self.plan.down.spec
        draw = spec.draw(Role.FPROP_X, self.key)
        stochastic = spec.gemms.fprop.x.rounding == "stochastic"
        if _coded(spec.gemms):
            fx = spec.gemms.fprop.x
            key, pairs = (self.key, self.pairs) if stochastic else (None, None)
            *codes, values = fused.swiglu_quantize(
                gate_up, factor, self.ends, *self.caps, fx.format, fx.rounding,
                key, draw.layer, draw.operand, pairs,
            )  # fmt: skip
            return codes if self.plan.keep_h else [], values, codes[2]
        h = fused.swiglu_rows(gate_up, factor, self.ends, *self.caps)
        draw = draw._replace(rows=self.pairs if stochastic else None)
        (values, amax), saved = kept.keep(h, spec.gemms, self.plan.keep_h, BF16, draw)
        return saved, values, amax

    def full_h(self, saved: kept.Saved, shape: tuple[int, ...]) -> list[Tensor]:
        """What the down product took of h, as `fused.swiglu_backward` reads it."""
        spec = self.plan.down.spec
        if _coded(spec.gemms):
            return saved
        draw = spec.draw(Role.FPROP_X, self.key)._replace(rows=self.pairs)
        return [kept.fprop_again(saved, spec.gemms, shape, BF16, draw, full=True).values]

    def split_dy(self, dy: Tensor, dgrad: bool, wgrad: bool) -> tuple[Values | None, Values | None]:
        """Operands of dgrad and wgrad of the down product from dy [T, H], those that are needed."""
        spec = self.plan.down.spec
        rows = self.plan.down.spec.gemms
        weight = fused.row_factors(
            self.order, self.ends, self.plan.k, None, "bf16", "one", None, "bf16", self.weights
        )
        if dgrad and wgrad and one_read(rows.dgrad.dy, rows.wgrad.dy):
            a, b = fused.gradient_both(dy, rows.dgrad.dy.format, self.token, weight, self.ends, self.tiles[0])
            return _plain(a), _plain(b)
        first = second = None
        if dgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.rows)
            values, amax = cast(dy, rows.dgrad.dy, -1, self.dgrad_dtype(spec), draw)
            first = Values(_take(values, self.token), amax)
        if wgrad:
            draw = spec.draw(Role.WGRAD_DY, self.key)._replace(rows=self.pairs)
            second = self.columns(dy, rows.wgrad.dy, self.wgrad_dtype(spec), draw, self.token, weight)
        return first, second

    def gate_gradients(
        self,
        gate_up: Tensor,
        factor: Tensor | None,
        g: Tensor,
        g_factor: Tensor | None,
        h: list[Tensor],
        dgrad: bool,
        wgrad: bool,
    ) -> tuple[Values | None, Values | None, Tensor]:
        """Operands of dgrad and wgrad of the up product, those that are needed, and the gradient at the
        routing weights [R] by pair; arguments as for `fused.swiglu_backward`."""
        arguments = (
            gate_up, factor, g, g_factor, self.weights, self.order, self.ends, *self.caps,
            h, self.plan.down.spec.gemms.fprop.x.format,
        )  # fmt: skip
        if not (dgrad and wgrad and self._up_in_codes()):
            d_up, dots = fused.swiglu_backward(*arguments, dgrad or wgrad)
            return *self.split(d_up, dgrad, wgrad), dots
        spec = self.plan.up.spec
        d_up, codes, scales, amax, dots = fused.swiglu_backward_fp8(*arguments)
        first = _plain(hopper.RowScaled(codes.view(FP8), scales))
        draw = spec.draw(Role.WGRAD_DY, self.key)
        return first, self.columns(d_up, spec.gemms.wgrad.dy, FP8, draw, amax=amax), dots

    def _up_in_codes(self) -> bool:
        """Whether both products that take the gradient of the up product multiply its codes, to nearest."""
        spec = self.plan.up.spec
        if not self.dgrad_dtype(spec) == self.wgrad_dtype(spec) == FP8:
            return False
        operands = (spec.gemms.dgrad.dy, spec.gemms.wgrad.dy)
        return all(operand.rounding == "nearest" and not operand.hadamard for operand in operands)

    def split(self, d_up: Tensor, dgrad: bool, wgrad: bool) -> tuple[Values | None, Values | None]:
        """The same of the up product, from the gradient of its rows."""
        spec = self.plan.up.spec
        rows = spec.gemms
        if dgrad and wgrad and one_read(rows.dgrad.dy, rows.wgrad.dy):
            a, b = fused.gradient_both(d_up, rows.dgrad.dy.format, None, None, self.ends, self.tiles[0])
            return _plain(a), _plain(b)
        first = second = None
        if dgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.pairs)
            first = cast(d_up, rows.dgrad.dy, -1, self.dgrad_dtype(spec), draw)
        if wgrad:
            draw = spec.draw(Role.WGRAD_DY, self.key)._replace(rows=self.pairs)
            shared = first is not None and spec.shares_dy
            dtype = self.wgrad_dtype(spec)
            second = first if shared else self.columns(d_up, rows.wgrad.dy, dtype, draw)
        return first, second

    def columns(
        self,
        x: Tensor,
        spec: Operand,
        dtype: torch.dtype,
        draw: Draw,
        index: Tensor | None = None,
        factor: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Values:
        """x as an operand of wgrad; row r is x[index[r]] * factor[r], or x[r]. `amax` of columns, if known,
        as for `fused.fp8_columns`."""
        if dtype == FP8 and not spec.hadamard:
            key = draw.key if spec.rounding == "stochastic" else None
            tiles, tile_ends = self.tiles
            codes, scales = fused.fp8_columns(
                x, spec.rounding, key, draw.layer, draw.operand, draw.rows, self.ends,
                index, factor, tiles, amax,
            )  # fmt: skip
            return _plain(hopper.row_scaled(codes, scales, tile_ends))
        rows = x if index is None else fused.gather_rows(x, index, factor)
        return cast(rows, spec, -2, dtype, draw, self.ends)

    def wgrad(
        self,
        dy: Values,
        saved: kept.Saved,
        shape: tuple[int, ...],
        spec: Spec,
        index: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """dy[R,N].T @ x[R,K] over each expert's rows: [E, N, K]; row r of x is row index[r] of `saved`."""
        gemms = spec.gemms
        draw = spec.draw(Role.WGRAD_X, self.key)._replace(rows=self.pairs)
        to = gemms.wgrad.x
        key = self.key if to.rounding == "stochastic" else None
        arguments = (to.rounding, key, draw.layer, draw.operand, self.pairs, self.ends)
        dtype_x, fprop = self.wgrad_dtype(spec), gemms.fprop.x.format
        if _coded(gemms) and dtype_x == FP8 and not to.hadamard:
            tiles, tile_ends = self.tiles
            codes, scales = fused.fp8_columns_of_codes(*saved, fprop, index, *arguments, tiles)
            x = _plain(hopper.row_scaled(codes, scales, tile_ends))
        elif _coded(gemms) and formats.get(to.format).scale == "e8m0" and not to.hadamard:
            x = _plain(fused.requantize_rows(*saved, fprop, index, to.format, *arguments, self.tiles[0]))
        elif not kept.from_codes(gemms):
            x = self.columns(saved[0], to, dtype_x, draw, index)
        else:
            saved = saved if index is None else kept.take(saved, gemms, index)
            x = kept.wgrad_operand(saved, gemms, shape, dtype_x, draw, self.ends)
        scale = product(outer(dy.amax, gemms.wgrad.dy), outer(x.amax, to))
        ends = ends_of(self.ends, to)
        out = gemm.grouped_columns(dy.values, x.values, ends, dtype if scale is None else torch.float32)
        return out if scale is None else (out * (scale[:, None, None] if scale.dim() else scale)).to(dtype)


def _coded(gemms: GemmTable) -> bool:
    """NVFP4 with an outer scale a token whose codes are kept: what the fused quantisers make."""
    fx = gemms.fprop.x
    fmt = formats.get(fx.format)
    eden = fx.rounding == "eden"
    return (
        kept.from_codes(gemms)
        and fmt.scale == "e4m3"
        and not fmt.outer_pow2
        and fx.outer == "row"
        and not eden
    )


def _plain(values: Any) -> Values:
    """Values of a format without an outer scale."""
    return Values(values, torch.empty(0))


def _take(values: Any, token: Tensor) -> Any:
    """Rows of values, or of codes."""
    if isinstance(values, Tensor):
        return fused.gather_rows(values, token, None)
    return values.index_select(0, token)
