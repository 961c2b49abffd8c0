"""The steps between the products of `fused_experts.py`: operands made, kept, made again and scaled."""

from typing import NamedTuple

import torch
from torch import Tensor

from nybble import formats
from nybble.formats import Operand as Role
from nybble.kernels import fused
from nybble.layers import gemm, kept
from nybble.layers.activation import Activation
from nybble.layers.operand import Codes, compute_dtype, token_scaled
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
        self.weights = weights.reshape(-1).float().contiguous()
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
        if coded(spec.gemms):
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
        if coded(spec.gemms):
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
        if coded(spec.gemms):
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
        if coded(spec.gemms):
            return saved
        draw = spec.draw(Role.FPROP_X, self.key)._replace(rows=self.pairs)
        return [kept.fprop_again(saved, spec.gemms, shape, BF16, draw, full=True).values]


def coded(gemms: GemmTable) -> bool:
    """NVFP4 with an outer scale a token whose codes are kept: what the fused quantisers make."""
    fx = gemms.fprop.x
    return kept.from_codes(gemms) and token_scaled(fx) and fx.rounding != "eden"
