"""The steps between the products of the backward pass of `fused_experts.py`: operands of dgrad and wgrad."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nybble import formats
from nybble.formats import Operand as Role
from nybble.kernels import fused, hopper
from nybble.layers import folded, gemm, kept
from nybble.layers.casting import cast
from nybble.layers.expert_pass import Pass, coded
from nybble.layers.operand import FP8, Draw, Values, ends_of, one_read, outer, product
from nybble.layers.weights import Spec
from nybble.recipes import Operand


class Split(NamedTuple):
    """The operands that dgrad and wgrad take of one gradient, those that are needed."""

    dgrad: Values | None
    wgrad: Values | None
    factor: Tensor | None = None
    """FP32 [R]: by what wgrad multiplies the rows of x, where it takes dgrad's codes."""


class Gradients(Pass):
    """A backward pass."""

    def split_dy(self, dy: Tensor, dgrad: bool, wgrad: bool) -> Split:
        """Operands of the down product from dy [T, H]."""
        spec = self.plan.down.spec
        gemms = spec.gemms
        if gemms.folds and wgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.rows)
            codes = folded.gradient(dy, gemms.dgrad.dy, draw, self.order, self.plan.k, self.weights)
            return self._folded(codes, spec, dgrad, self.token)
        weight = fused.row_factors(
            self.order, self.ends, self.plan.k, None, "bf16", "one", None, "bf16", self.weights
        )
        if dgrad and wgrad and one_read(gemms.dgrad.dy, gemms.wgrad.dy):
            a, b = fused.gradient_both(
                dy, gemms.dgrad.dy.format, self.token, weight, self.ends, self.tiles[0]
            )
            return Split(_plain(a), _plain(b))
        first = second = None
        if dgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.rows)
            values, amax = cast(dy, gemms.dgrad.dy, -1, self.dgrad_dtype(spec), draw)
            first = Values(_take(values, self.token), amax)
        if wgrad:
            draw = spec.draw(Role.WGRAD_DY, self.key)._replace(rows=self.pairs)
            second = self.columns(dy, gemms.wgrad.dy, self.wgrad_dtype(spec), draw, self.token, weight)
        return Split(first, second)

    def _folded(self, codes: folded.Gradient, spec: Spec, dgrad: bool, index: Tensor | None) -> Split:
        """Operands of a product whose wgrad takes dgrad's codes; row r is row index[r] of them, or row r."""
        first = None
        if dgrad:
            first = codes.along(spec.gemms.dgrad.dy, self.dgrad_dtype(spec))
            first = first if index is None else Values(_take(first.values, index), first.amax)
        dtype = self.wgrad_dtype(spec)
        tiles = self.tiles if dtype == FP8 else None
        second = codes.across(spec.gemms.wgrad.dy, dtype, self.ends, index, tiles)
        return Split(first, second, codes.factor)

    def gate_gradients(
        self,
        gate_up: Tensor,
        factor: Tensor | None,
        g: Tensor,
        g_factor: Tensor | None,
        h: list[Tensor],
        dgrad: bool,
        wgrad: bool,
    ) -> tuple[Split, Tensor]:
        """Operands of the up product, and the gradient at the routing weights [R] by pair; arguments as for
        `fused.swiglu_backward`."""
        arguments = (
            gate_up, factor, g, g_factor, self.weights, self.order, self.ends, *self.caps,
            h, self.plan.down.spec.gemms.fprop.x.format,
        )  # fmt: skip
        gemms = self.plan.up.spec.gemms
        if dgrad and wgrad and one_read(gemms.dgrad.dy, gemms.wgrad.dy):
            a, b, dots = fused.swiglu_backward_both(*arguments, gemms.dgrad.dy.format, self.tiles[0])
            return Split(_plain(a), _plain(b)), dots
        if dgrad and wgrad and self._up_in_codes():
            tiles, tile_ends = self.tiles
            codes, columns, scales, dots = fused.swiglu_backward_fp8(*arguments, tiles)
            first = hopper.RowScaled(codes.view(FP8), scales)
            second = hopper.RowScaled(columns.view(FP8), None, tile_ends)
            return Split(_plain(first), _plain(second), scales), dots
        d_up, dots = fused.swiglu_backward(*arguments, dgrad or wgrad)
        return self.split(d_up, dgrad, wgrad), dots

    def _up_in_codes(self) -> bool:
        """Whether both products that take the gradient of the up product multiply its codes, to nearest."""
        spec = self.plan.up.spec
        in_codes = self.dgrad_dtype(spec) == self.wgrad_dtype(spec) == FP8
        return in_codes and spec.gemms.folds and spec.gemms.dgrad.dy.rounding == "nearest"

    def split(self, d_up: Tensor, dgrad: bool, wgrad: bool) -> Split:
        """The same of the up product, from the gradient of its rows."""
        spec = self.plan.up.spec
        gemms = spec.gemms
        if gemms.folds and wgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.pairs)
            return self._folded(folded.gradient(d_up, gemms.dgrad.dy, draw), spec, dgrad, None)
        first = second = None
        if dgrad:
            draw = spec.draw(Role.DGRAD_DY, self.key)._replace(rows=self.pairs)
            first = cast(d_up, gemms.dgrad.dy, -1, self.dgrad_dtype(spec), draw)
        if wgrad:
            draw = spec.draw(Role.WGRAD_DY, self.key)._replace(rows=self.pairs)
            shared = first is not None and spec.shares_dy
            dtype = self.wgrad_dtype(spec)
            second = first if shared else self.columns(d_up, gemms.wgrad.dy, dtype, draw)
        return Split(first, second)

    def columns(
        self,
        x: Tensor,
        spec: Operand,
        dtype: torch.dtype,
        draw: Draw,
        index: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> Values:
        """x as an operand of wgrad; row r is x[index[r]] * factor[r], or x[r]."""
        if dtype == FP8 and not spec.hadamard:
            key = draw.key if spec.rounding == "stochastic" else None
            tiles, tile_ends = self.tiles
            codes, scales = fused.fp8_columns(
                x, spec.rounding, key, draw.layer, draw.operand, draw.rows, self.ends,
                index, factor, tiles,
            )  # fmt: skip
            return _plain(hopper.row_scaled(codes, scales, tile_ends))
        if index is not None:
            x = fused.gather_rows(x, index, factor)
        elif factor is not None:
            x = kept.times(x, factor)
        return cast(x, spec, -2, dtype, draw, self.ends)

    def wgrad(
        self,
        dy: Values,
        saved: kept.Saved,
        shape: tuple[int, ...],
        spec: Spec,
        index: Tensor | None,
        dtype: torch.dtype,
        factor: Tensor | None = None,
    ) -> Tensor:
        """dy[R,N].T @ x[R,K] over each expert's rows: [E, N, K]; row r of x is row index[r] of `saved`, times
        factor[r]."""
        gemms = spec.gemms
        draw = spec.draw(Role.WGRAD_X, self.key)._replace(rows=self.pairs)
        to = gemms.wgrad.x
        key = self.key if to.rounding == "stochastic" else None
        arguments = (to.rounding, key, draw.layer, draw.operand, self.pairs, self.ends)
        dtype_x, fprop = self.wgrad_dtype(spec), gemms.fprop.x.format
        if coded(gemms) and dtype_x == FP8 and not to.hadamard:
            tiles, tile_ends = self.tiles
            codes, scales = fused.fp8_columns_of_codes(*saved, fprop, index, *arguments, tiles, factor)
            x = _plain(hopper.row_scaled(codes, scales, tile_ends))
        elif coded(gemms) and formats.get(to.format).scale == "e8m0" and not to.hadamard:
            x = _plain(fused.requantize_rows(*saved, fprop, index, to.format, *arguments, self.tiles[0]))
        elif not kept.from_codes(gemms):
            x = self.columns(saved[0], to, dtype_x, draw, index, factor)
        else:
            saved = saved if index is None else kept.take(saved, gemms, index)
            x = kept.wgrad_operand(saved, gemms, shape, dtype_x, draw, self.ends, factor)
        scale = product(outer(dy.amax, gemms.wgrad.dy), outer(x.amax, to))
        ends = ends_of(self.ends, to)
        out = gemm.grouped_columns(dy.values, x.values, ends, dtype if scale is None else torch.float32)
        return out if scale is None else (out * (scale[:, None, None] if scale.dim() else scale)).to(dtype)


def _plain(values: Any) -> Values:
    """Values of a format without an outer scale."""
    return Values(values, torch.empty(0))


def _take(values: Any, token: Tensor) -> Any:
    """Rows of values, or of codes."""
    if isinstance(values, Tensor):
        return fused.gather_rows(values, token, None)
    return values.index_select(0, token)
