"""One quantised matrix (or a stack of them, one an expert) as bytes, between the trainer's formats and the
dialects.

Dialects agree on codes and block scales and differ in the outer scale: some store the number to divide by
(S_enc), others the number to multiply with (S_dec). The trainer multiplies with S_dec = 1/S_enc, rounded once
to FP32. Both numbers are kept here, so that each dialect stores the one it wants without rounding it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import nybble.kernels  # noqa: F401  (registers the fast implementations of the ops)
from nybble import formats
from nybble.errors import CheckpointError
from nybble.formats.fp32 import divide
from nybble.formats.qtensor import quantize

STORED = {
    name: kind for kind in ("nvfp4", "mxfp4", "mxfp8") for name in formats.names() if name.startswith(kind)
}
"""What a format of the trainer is on disk: tiles, Four Over Six and rounding rules leave no trace there."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Codes [..., N, K] (two a byte for 4-bit formats), scale bytes [..., N, ceil(K/block)], outer scales
    [...] or None.
    """

    kind: str
    """"nvfp4", "mxfp4" or "mxfp8": E2M1 with E4M3 scales, E2M1 with E8M0 scales, E4M3 with E8M0 scales."""
    codes: Tensor
    scales: Tensor
    multiplier: Tensor | None
    """S_dec, FP32: value = code * scale * multiplier. None for one-level formats."""
    divisor: Tensor | None
    """S_enc, FP32: what dialects that divide store."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        per_byte = 2 if formats.get(self.kind).packed else 1
        return (*self.codes.shape[:-1], self.codes.shape[-1] * per_byte)

    def __getitem__(self, expert: int) -> Packed:
        """The matrix of one expert of a stack."""
        return self._map(lambda tensor: tensor[expert])

    def rows(self, rows: slice) -> Packed:
        """Some rows [..., rows, :]; the outer scale stays that of the whole."""
        return replace(self, codes=self.codes[..., rows, :], scales=self.scales[..., rows, :])

    def _map(self, function) -> Packed:  # type: ignore[no-untyped-def]
        return Packed(
            kind=self.kind,
            codes=function(self.codes),
            scales=function(self.scales),
            multiplier=None if self.multiplier is None else function(self.multiplier),
            divisor=None if self.divisor is None else function(self.divisor),
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., N, K] as the trainer computes them: (code * scale) * multiplier in FP32, then cast."""
        empty = self.codes.new_empty(0, dtype=torch.float32)
        two_level = formats.get(self.kind).two_level
        outer = self.codes.new_zeros((), dtype=torch.float32) if two_level else empty
        values = torch.ops.nybble.dequantize(
            self.codes, self.scales, outer, self.kind, -1, list(self.shape), torch.float32, "tensor", False
        )
        if self.multiplier is not None:
            values *= self.multiplier.reshape(*self.multiplier.shape, 1, 1)
        return values.to(dtype)


def stack(parts: list[Packed]) -> Packed:
    """[N, K] matrices of one kind and shape as one [E, N, K]."""
    first = parts[0]
    return Packed(
        kind=first.kind,
        codes=torch.stack([part.codes for part in parts]),
        scales=torch.stack([part.scales for part in parts]),
        multiplier=None if first.multiplier is None else torch.stack([_scalar(p.multiplier) for p in parts]),
        divisor=None if first.divisor is None else torch.stack([_scalar(p.divisor) for p in parts]),
    )


def _scalar(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.reshape(())


def encode(weight: Tensor, format: str) -> Packed:
    """Quantise a weight [N, K] or a stack [E, N, K] along K exactly as the forward pass does: nearest, one
    outer a matrix.

    Raises:
        CheckpointError: the format has no place in a checkpoint, or the weight holds NaN or infinity.
    """
    if format not in STORED:
        raise CheckpointError(
            f"{format} cannot be stored in a four-bit checkpoint; use one of {', '.join(STORED)}"
        )
    row = formats.get(format)
    q = quantize(weight, format, axis=-1, outer="matrix" if weight.dim() == 3 else "tensor")
    scales = q.scales
    if row.block_rows > 1:
        # one byte a tile in the trainer, one a row on disk: every row of a tile repeats the tile's byte
        scales = scales.repeat_interleave(row.block_rows, dim=-2)[..., : weight.shape[-2], :]
    # the quantiser makes no negative scale, so the byte of NaN is the largest there is
    if scales.numel() and int(scales.max()) == (255 if row.scale == "e8m0" else 0x7F):
        raise CheckpointError("the weight holds NaN or infinity; no checkpoint can be made of it")
    two_level = row.two_level
    return Packed(
        kind=STORED[format],
        codes=q.codes,
        scales=scales.contiguous(),
        multiplier=q.tensor_scale if two_level else None,
        divisor=q.encode_scale if two_level else None,
    )


def reciprocal(scale: Tensor) -> Tensor:
    """The FP32 number next to 1/scale whose own reciprocal is `scale`, where there is one; else 1/scale
    rounded.
    """
    near = divide(1.0, scale)
    best = near
    for neighbour in (torch.full_like(near, float("inf")), torch.zeros_like(near)):
        candidate = torch.nextafter(near, neighbour)
        better = (divide(1.0, best) != scale) & (divide(1.0, candidate) == scale)
        best = torch.where(better, candidate, best)
    return best
