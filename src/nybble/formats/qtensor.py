"""QTensor: a quantised tensor, and the functions that make one. All of it goes through the ops of `ops.py`.

Axes other than the last two are quantised by flattening what stands before and behind them, so that the draw
of an element is still named by its row-major index in the whole tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nybble.errors import NybbleError
from nybble.formats import ops
from nybble.formats import outer as outer_scale
from nybble.formats.philox import Key
from nybble.formats.table import Format, get


@dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """Codes with the scales that give them meaning; dequantised value = code * block scale * tensor_scale."""

    codes: Tensor
    """uint8 [..., R, L], quantised axis last, two E2M1 codes a byte; the values for bf16, fp32."""
    scales: Tensor
    """Block scales [..., R, ceil(L / block)]: E4M3 or E8M0 bytes as uint8, or float32."""
    amax: Tensor
    """float32, largest finite magnitude a unit of `outer`; shape [0] for formats of one level."""
    format: str
    """Name in the table of formats."""
    axis: int
    """Quantised axis, counted from the end (negative)."""
    shape: tuple[int, ...]
    """Of the logical tensor."""
    outer: str = "tensor"
    """What shares an outer scale: "tensor", "row" or "matrix"."""
    offs: Tensor | None = None
    """int32 [G], cumulative ends of token groups, or None."""

    def __repr__(self) -> str:
        return (
            f"QTensor({self.format}, shape={self.shape}, axis={self.axis}, outer={self.outer!r}, "
            f"{self.bits_per_value:.4g} bits a value, device={str(self.codes.device)!r})"
        )

    @property
    def spec(self) -> Format:
        """The row of the table of formats."""
        return get(self.format)

    @property
    def encode_scale(self) -> Tensor:
        """S_enc, which values are multiplied by before block scales are chosen; 1 if of one level."""
        return (
            outer_scale.encode_scale(self.spec, self.amax) if self.spec.two_level else self.amax.new_ones(())
        )

    @property
    def tensor_scale(self) -> Tensor:
        """S_dec = 1 / S_enc, of the shape of `amax`; 1 for formats of one level."""
        return (
            outer_scale.decode_scale(self.spec, self.amax) if self.spec.two_level else self.amax.new_ones(())
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and outer amaxes."""
        return self.codes.nbytes + self.scales.nbytes + self.amax.nbytes

    @property
    def bits_per_value(self) -> float:
        """Bits that a value really takes here, tails and outer scales counted."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else self.spec.bits_per_value

    def dequantize(self, dtype: torch.dtype = torch.float32, apply_outer: bool = True) -> Tensor:
        """Values in `shape` and `dtype`; without the outer scale if apply_outer is False."""
        if not isinstance(dtype, torch.dtype):
            raise NybbleError(f"dtype must be a torch.dtype such as torch.float32, not {dtype!r}")
        shape, axis = _as_last_two(self.shape, self.axis)
        codes, scales, amax = self.codes, self.scales, self.amax
        if self.axis < -2:
            codes = codes.reshape(shape[0], shape[2], codes.shape[-1])
            scales = scales if self.spec.passthrough else scales.reshape(shape[0], shape[2], scales.shape[-1])
            amax = amax.reshape(shape[0], shape[2]) if self.spec.two_level and self.outer == "row" else amax
        out = ops.dequantize(
            codes, scales, amax, self.format, axis, shape, dtype, self.outer, apply_outer, self.offs
        )
        return out.reshape(self.shape)

    def requantize(
        self,
        format: str,
        axis: int = -1,
        rounding: str = "nearest",
        key: Key | None = None,
        outer: str = "tensor",
        rows: Tensor | None = None,
        offs: Tensor | None = None,
    ) -> "QTensor":
        """Quantise the full FP32 value again, in another format or along another axis.

        `offs` groups the result's tokens; None keeps the groups of this one. Other arguments as for
        `quantize`.
        """
        axis = _from_end(len(self.shape), axis)
        offs = self.offs if offs is None else offs
        same_groups = offs is self.offs or (self.axis == -1 and self.outer != "matrix")
        if not same_groups or min(axis, self.axis) < -2:
            return quantize(self.dequantize(), format, axis, rounding, outer, key, rows, offs)
        k, layer, operand = _key_arguments(key, rounding, self.codes.device)
        codes, scales, amax = ops.requantize(
            self.codes, self.scales, self.amax, self.format, self.axis, self.outer, self.shape,
            format, axis, rounding, outer, k, layer, operand, rows, offs,
        )  # fmt: skip
        return QTensor(codes, scales, amax, format, axis, self.shape, outer, offs)

    def to(self, device: torch.device | str) -> "QTensor":
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("codes", "scales", "amax")}
        return replace(self, **moved, offs=None if self.offs is None else self.offs.to(device))


def quantize(
    x: Tensor,
    format: str,
    axis: int = -1,
    rounding: str = "nearest",
    outer: str = "tensor",
    key: Key | None = None,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
) -> QTensor:
    """Quantise a tensor.

    Args:
        x: float32, bfloat16 or float16, any shape but 0-d, any strides.
        format: a name of `nybble.formats.names()`.
        axis: along which blocks run.
        rounding: "nearest" (ties to even) or "stochastic", which needs `key`.
        outer: what shares an outer scale in two-level formats: "tensor", "row" (one for each index of the
            other axes: a token's numbers then do not depend on its batch), "matrix" (one for each leading
            index, or group of `offs`).
        key: `nybble.key(seed, step, layer, operand, micro)`.
        rows: int64 [R] for 2-D x: which row of the draws each row of x uses, so that a token's draw follows
            it around.
        offs: int32 [G] for 2-D x: cumulative ends of token groups; along axis -2 no block spans two of them.
    Raises:
        NybbleError: for arguments that do not fit, in one sentence that names the fix.
    """
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        what = f"one of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise NybbleError(f"can quantise a dense torch.Tensor, not {what}")
    fmt = get(format)
    axis = _from_end(x.dim(), axis)
    k, layer, operand = _key_arguments(key, rounding, x.device)
    shape = tuple(x.shape)
    flat, flat_axis = _as_last_two(shape, axis)
    if axis < -2:
        if fmt.square or (fmt.two_level and outer == "matrix"):
            raise NybbleError(
                f'square blocks and outer="matrix" need axis -1 or -2, not {axis}; move the axis first'
            )
        x = x.reshape(flat)
    codes, scales, amax = ops.quantize(x, format, flat_axis, rounding, outer, k, layer, operand, rows, offs)
    if axis < -2:
        others = shape[:axis] + shape[axis + 1 :]
        codes = codes.reshape(*others, codes.shape[-1])
        scales = scales.reshape(*others, scales.shape[-1]) if scales.dim() == 3 else scales
        amax = amax.reshape(others) if amax.dim() == 2 else amax
    return QTensor(codes, scales, amax, format, axis, shape, outer, offs)


def _from_end(dims: int, axis: int) -> int:
    if dims == 0:
        raise NybbleError("cannot quantise a tensor without dimensions; reshape it to [1]")
    if not -dims <= axis < dims:
        raise NybbleError(f"axis {axis} does not exist in a tensor of {dims} dimensions")
    return axis - dims if axis >= 0 else axis


def _as_last_two(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], int]:
    """The shape and axis that the ops take: [before, axis, behind] and -2 for an axis further in front."""
    if axis >= -2:
        return tuple(shape), axis
    at = len(shape) + axis
    return (math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])), -2


def _key_arguments(key: Key | None, rounding: str, device: torch.device) -> tuple[Tensor | None, int, int]:
    if key is None:
        return None, 0, 0
    if not isinstance(key, Key):
        raise NybbleError(f"key must be nybble.key(seed, step, layer, operand), not {key!r}")
    if rounding == "nearest":
        raise NybbleError('a key does nothing with rounding="nearest"; leave it out or choose "stochastic"')
    return key.tensor(device), key.layer, key.operand
