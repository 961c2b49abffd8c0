"""Stored codes as the source of values: decoded whole, or row by row inside the quantiser."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.formats import blocks, e2m1, e4m3, e8m0, grouped
from nybble.formats import outer as outer_scale
from nybble.formats.table import Format
from nybble.kernels.cpu.blocks import SINGLE, WHOLE_ROW
from nybble.kernels.cpu.decode import dequantize_rows
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split


@cache
def code_table(element: str) -> Any:
    """float32 [256]: the value of each byte; for E2M1 of its low nibble."""
    byte = torch.arange(256, dtype=torch.uint8)
    return (e2m1.decode(byte & 15) if element == "e2m1" else e4m3.decode(byte)).numpy()


@cache
def pair_table() -> Any:
    """float32 [512]: the two values of each packed byte."""
    byte = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack([e2m1.decode(byte & 15), e2m1.decode(byte >> 4)], dim=1)
    return pairs.reshape(-1).contiguous().numpy()


@cache
def scale_table(scale: str) -> Any:
    """float32 [256]: the value of each scale byte."""
    byte = torch.arange(256, dtype=torch.uint8)
    return (e4m3.decode(byte) if scale == "e4m3" else e8m0.decode(byte)).numpy()


def shift_of(fmt: Format, length: int) -> int:
    """The `shift` of `blocks.py` for blocks along an axis of `length`."""
    if fmt.block_cols is None:
        return SINGLE if length == 1 else WHOLE_ROW
    return fmt.block_cols.bit_length() - 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Rows of stored codes, as flat arrays."""

    codes: Any
    packed: bool
    code_table: Any
    scales: Any
    scales_fp32: Any
    fp32: bool
    scale_table: Any
    shift: int
    outer: Any

    def arguments(self) -> tuple[Any, ...]:
        """In the kernels' order, from the codes to the shift."""
        return (self.codes, self.packed, self.code_table, pair_table(), self.scales, self.scales_fp32,
                self.fp32, self.scale_table, self.shift)  # fmt: skip


NO_BYTES = np.empty(1, np.uint8)
NO_FLOATS = np.empty(1, np.float32)
NO_HALVES = np.empty(0, np.uint16)
NO_ROWS = np.empty(0, np.int64)
NO_KEY = np.zeros(6, np.uint64)
NO_SOURCE = Source(
    codes=NO_BYTES,
    packed=False,
    code_table=NO_FLOATS,
    scales=NO_BYTES,
    scales_fp32=NO_FLOATS,
    fp32=False,
    scale_table=NO_FLOATS,
    shift=0,
    outer=NO_FLOATS,
)


def stored_rows(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    fmt: Format,
    shape: torch.Size,
    axis: int,
    outer: str,
    apply_outer: bool,
    offs: Tensor | None,
) -> Source:
    """The rows of stored codes. With offs along axis -2 one scale a group varies in them: leave it out."""
    fp32 = fmt.scale == "fp32"
    values = flat(scales)
    stored = blocks.stored_shape(fmt, shape, axis, None)
    s_dec = torch.ones(())
    if fmt.two_level and apply_outer:
        s_dec = outer_scale.spread(outer_scale.decode_scale(fmt, amax), outer, shape, offs, None)
    return Source(
        codes=flat(codes),
        packed=fmt.packed,
        code_table=code_table(fmt.element),
        scales=NO_BYTES if fp32 else values,
        scales_fp32=values if fp32 else NO_FLOATS,
        fp32=fp32,
        scale_table=NO_FLOATS if fp32 else scale_table(fmt.scale or ""),
        shift=shift_of(fmt, stored[-1]),
        outer=flat(s_dec.expand(*stored[:-1], 1)),
    )


def decoded(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    fmt: Format,
    axis: int,
    shape: torch.Size,
    outer: str,
    apply_outer: bool,
    offs: Tensor | None,
) -> Tensor:
    """float32 values in the logical shape, contiguous."""
    where = grouped.packing(fmt, offs, shape[0]) if offs is not None and axis == -2 else None
    stored = blocks.stored_shape(fmt, shape, axis, None if where is None or offs is None else offs.shape[0])
    out = fresh(*stored)
    if out.numel() == 0:  # groups that hold no token
        return torch.zeros(shape, dtype=torch.float32)
    later = where is not None and outer == "matrix" and fmt.two_level and apply_outer
    s = stored_rows(codes, scales, amax, fmt, shape, axis, outer, apply_outer and not later, offs)
    split(
        dequantize_rows, out.numel() // stored[-1], out.numel(), stored[-1], *s.arguments(), fmt.block_rows,
        stored[-2] if len(stored) > 1 else 1, s.outer, flat(out),
    )  # fmt: skip
    if later:
        out *= outer_scale.spread(outer_scale.decode_scale(fmt, amax), outer, shape, offs, where)
    if where is not None:
        return grouped.unpack_columns(out, where).contiguous()
    return out.transpose(-1, -2).contiguous() if axis == -2 else out


def flat(t: Tensor) -> Any:
    """The elements as a numpy array of one dimension; shares memory if contiguous."""
    array = _shared(t, (t.numel(),))
    return as_array(t.detach().contiguous().view(-1)) if array is None else array


def dense(t: Tensor) -> Any:
    """A tensor as a numpy array of its shape; shares memory if contiguous."""
    array = _shared(t, t.shape)
    return as_array(t if t.is_contiguous() else t.detach().contiguous()) if array is None else array


class _Memory:
    """What numpy reads of memory that a tensor owns."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Tensor, kind: str, shape: tuple[int, ...]) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (owner.data_ptr(), False),
            "shape": shape,
            "typestr": kind,
            "version": 3,
        }


_KINDS = {
    torch.float32: np.dtype(np.float32).str,
    torch.int64: np.dtype(np.int64).str,
    torch.int32: np.dtype(np.int32).str,
    torch.uint8: np.dtype(np.uint8).str,
}


def _shared(t: Tensor, shape: tuple[int, ...]) -> Any:
    """An array of `shape` on the memory of a contiguous tensor; None where numpy has no direct way to it."""
    kind = _KINDS.get(t.dtype)
    if kind is None or not t.is_cpu or not t.is_contiguous() or not t.numel():
        return None
    return np.asarray(_Memory(t, kind, shape))


def as_array(t: Tensor) -> Any:
    """A numpy array on the memory of `t`.

    Tensor.numpy() forbids to free a tensor's storage from then on, as FSDP does with gathered weights; DLPack
    does not, but it is slow, and old versions of numpy make its arrays read-only.
    """
    array = _shared(t, t.shape)
    if array is not None:
        return array
    array = np.from_dlpack(t.detach())
    return array if array.flags.writeable else t.numpy()
