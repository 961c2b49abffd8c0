"""Draws that depend on what is rounded, never on how: Philox4x32-10 keyed by seed and counted by element.

The draw of an element is 16 bits out of one Philox block (Salmon et al., Parallel random numbers: as easy as
1, 2, 3, SC 2011) whose key is the seed and whose counter names the element::

    key      k0 = seed & 0xffffffff          k1 = (seed >> 32) & 0xffffffff
    element  e = (leading * R + row) * C + col      row-major index in the logical tensor [..., R, C]; with
             `rows`, `row` is replaced by rows[row]; `first`, a multiple of 8, is added: the index in the
             whole of which the tensor is a part. g = e >> 3, j = e & 7: eight elements share a block.
    counter  c0 = g & 0xffffffff             c1 = ((g >> 32) & 0xffff) | (micro << 16)
             c2 = step & 0xffffffff          c3 = (layer << 8) | operand
    draw     (w[j >> 1] >> (16 * (j & 1))) & 0xffff       of the output words w[0..3]

So a draw does not depend on tiling, device, world size, quantised axis, or whether a forward pass is
recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral

import torch
from torch import Tensor

from nybble.errors import NybbleError

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
GROUP = 8
"""Elements that share a Philox block."""


class Operand(IntEnum):
    """Which operand of which GEMM is rounded: two operands of a layer never share a draw."""

    FPROP_X = 0
    FPROP_W = 1
    DGRAD_DY = 2
    DGRAD_W = 3
    WGRAD_DY = 4
    WGRAD_X = 5


LIMITS = {"seed": 1 << 63, "step": 1 << 32, "layer": 1 << 24, "operand": 1 << 8, "micro": 1 << 16}


def check_range(field: str, value: int) -> None:
    """NybbleError unless `value` fits the bits that the counter gives to `field`."""
    if not 0 <= value < LIMITS[field]:
        raise NybbleError(
            f"{field} of a rounding key must be in [0, 2^{LIMITS[field].bit_length() - 1}), not {value}"
        )


@dataclass(frozen=True)
class Key:
    """What a stochastic rounding draws from. Two equal keys on equal tensors give equal bits."""

    seed: int
    """Of the run."""
    step: int = 0
    """Optimiser step."""
    layer: int = 0
    """Index of the quantised module in its model."""
    operand: int = 0
    """An `Operand`, or any number below 256."""
    micro: int = 0
    """Micro-batch within the step; weights always use 0, so that their codes serve every micro-batch."""

    def __post_init__(self) -> None:
        for field in LIMITS:
            value = getattr(self, field)
            if not isinstance(value, Integral):
                raise NybbleError(f"{field} of a rounding key must be a whole number, not {value!r}")
            check_range(field, int(value))

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """(seed, step, micro) as int64 [3], as the ops take it: no compiled graph specialises on it."""
        return torch.tensor([self.seed, self.step, self.micro], dtype=torch.int64, device=device)


def key(seed: int, step: int = 0, layer: int = 0, operand: int = 0, micro: int = 0) -> Key:
    """A rounding key; NybbleError where a field is out of range."""
    return Key(seed, step, layer, operand, micro)


def part_key(key: Tensor, first: int) -> Tensor:
    """`key` int64 [3] or [4] for a part whose first element is number `first` of the whole, as int64 [4].

    NybbleError unless `first` is a multiple of 8: kernels on GPUs count in groups of eight elements.
    """
    if first % GROUP:
        raise NybbleError(
            f"a part of a tensor that is rounded at random begins at element {first} of the whole; "
            f"that must be a multiple of {GROUP}"
        )
    key = torch.nn.functional.pad(key[:3], (0, 1))
    key[3] = first
    return key


def _mulhilo(m: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of m * b. By halves of b, as int64 has no room for products of 2^64."""
    low, high = m * (b & 0xFFFF), m * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 on int64 tensors that hold 32-bit words; shapes broadcast. Returns the four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def draws(key: Tensor, shape: Sequence[int], layer: int, operand: int, rows: Tensor | None = None) -> Tensor:
    """The 16-bit draw of every element of a tensor.

    Args:
        key: int64 [3] or [4], (seed, step, micro, first), where first is 0 if left out.
        shape: of the logical tensor, [..., R, C] or [C].
        layer, operand: the rest of the counter.
        rows: int64 [R] for a 2-D tensor: the row index that each row counts as, None for its own.
    Returns:
        int64 of `shape`, values in [0, 65536).
    """
    seed, step, micro, *part = key.to(torch.int64).unbind()
    cols = shape[-1]
    count = 1
    for n in shape[:-1]:
        count *= n
    index = torch.arange(count, device=key.device) if rows is None else rows.to(torch.int64)
    first = index * cols + (part[0] if part else 0)  # element index of each row's first element
    span = cols // 8 + 2  # Philox blocks that cover a row wherever it starts within its first block
    g = (first >> 3)[:, None] + torch.arange(span, device=key.device)
    words = philox4x32(
        (
            g & _MASK,
            ((g >> 32) & 0xFFFF) | ((micro & 0xFFFF) << 16),
            step & _MASK,
            torch.full_like(g, (layer << 8) | operand),
        ),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    halves = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], dim=-1)  # [rows, span, 8]
    take = (first & 7)[:, None] + torch.arange(cols, device=key.device)
    return halves.flatten(1).gather(1, take).reshape(tuple(shape))
