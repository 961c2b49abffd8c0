"""wgrad that takes dgrad's codes of dy: the scale of each row goes into x before x is rounded.

dW[N,K] = dy[T,N].T @ x[T,K] with dy[t] = s[t] q[t], codes q and one scale s a row, is q.T @ (s x): a sum over
T in which no scale of q is left. So dy is rounded once for both products, and x along T as it is anyway.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nybble.kernels import direct, fused, hopper
from nybble.layers.casting import decode, encode
from nybble.layers.operand import FP8, Codes, Draw, Values
from nybble.recipes import Operand


class Gradient(NamedTuple):
    """dy as codes of rows."""

    codes: Codes
    """E4M3 [T, N] and scales [T, 1]."""
    factor: Tensor
    """FP32: by what each row of x is multiplied."""

    def along(self, spec: Operand, dtype: torch.dtype) -> Values:
        """The operand of dgrad."""
        return Values(decode(self.codes, spec, -1, self.codes.codes.shape, dtype), self.codes.amax)

    def across(
        self,
        spec: Operand,
        dtype: torch.dtype,
        offs: Tensor | None = None,
        index: Tensor | None = None,
        tiles: tuple[Tensor, Tensor] | None = None,
    ) -> Values:
        """The operand of wgrad, without the scales: rows `index` [R] of dy, or all, in groups that end at
        `offs`. `tiles` as `fused.token_tiles` gives them, where they are known."""
        q, none = self.codes.codes, self.codes.amax
        if dtype == FP8:
            assert offs is not None
            rows = len(q if index is None else index)
            table, ends = fused.token_tiles(offs, rows) if tiles is None else tiles
            columns = fused.transpose_codes(q, offs, index, table)
            return Values(hopper.RowScaled(columns.view(FP8), None, ends), none)
        ones = torch.ones_like(self.codes.scales)
        values = direct.dequantize(q, ones, none, spec.format, -1, q.shape, dtype, spec.outer, False)
        return Values(values if index is None else values.index_select(0, index), none)


def gradient(
    dy: Tensor,
    spec: Operand,
    draw: Draw,
    order: Tensor | None = None,
    k: int = 1,
    weights: Tensor | None = None,
) -> Gradient:
    """dy [T, N] as the operand `spec` of dgrad; the rest as for `fused.gradient_factors`."""
    codes = encode(dy, spec, -1, draw)
    scales = codes.scales.squeeze(-1)
    return Gradient(codes, fused.gradient_factors(codes.codes, scales, order, k, weights))
