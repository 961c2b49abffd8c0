"""Launches of `rows.py` and `amax.py`, their tiles chosen."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nybble.formats.table import Format
from nybble.kernels.cuda import amax as amax_kernel
from nybble.kernels.cuda import groups as group_kernel
from nybble.kernels.cuda import rows as row_kernel
from nybble.kernels.cuda.jit import cdiv, use_asm, whole_key
from nybble.kernels.cuda.row_source import Gated, Rows, unit_of

ENOUGH_PROGRAMS = 2048  # to fill any GPU several times over
FEW_ELEMENTS = 1 << 24  # so few that programs of half the size use a GPU better
GRID_LIMIT = 65535  # of the second axis of a CUDA grid
SCALES = {("e4m3", None): 0, ("e8m0", "up"): 1, ("e8m0", "floor"): 2, ("fp32", None): 3}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What stochastic rounding draws from; `key` None is rounding to nearest."""

    key: Tensor | None = None
    layer: int = 0
    operand: int = 0
    rows: Tensor | None = None

    @classmethod
    def of(cls, rounding: str, key: Tensor | None, layer: int, operand: int, rows: Tensor | None) -> "Draw":
        """That of an op's arguments; none where it rounds to nearest."""
        if rounding == "nearest" or key is None:
            return cls()
        rows = None if rows is None else rows.to(torch.int64).contiguous()
        return cls(key=whole_key(key), layer=layer, operand=operand, rows=rows)

    @property
    def stochastic(self) -> bool:
        """Whether there is a key."""
        return self.key is not None

    @property
    def tag(self) -> int:
        """The last word of the counter."""
        return (self.layer << 8) | self.operand


def pow2(n: int) -> int:
    """The smallest power of two not below n."""
    return triton.next_power_of_2(max(n, 1))


def grid(rows: int, tiles: int) -> tuple[tuple[int, int], int]:
    """The grid, and which of its axes counts rows."""
    return ((tiles, rows), 1) if rows <= GRID_LIMIT and rows < tiles else ((rows, tiles), 0)


def row_groups(offs: Tensor, rows: int) -> Tensor:
    """int32 [rows]: the group of each row, the last for those of none."""
    out = torch.empty(rows, dtype=torch.int32, device=offs.device)
    n, g = 128, offs.shape[0]
    if rows and g:
        group_kernel.row_groups[(cdiv(rows, n),)](offs, out, rows, g, N=n, G=pow2(g), enable_fp_fusion=True)
    return out


def measure(x: Rows, shape: list[int], group: Tensor | None, offs: Tensor | None) -> Tensor:
    """Outer amaxes (FP32, of `shape`) of rows: one a row, or one for each value of `group`."""
    out = torch.zeros(shape, dtype=torch.float32, device=x.x.device)
    if out.numel() == 0 or x.x.numel() == 0:
        return out
    count, width = x.x.shape
    units, n = width // 8, max(128, min(1024, pow2(width // 8)))
    (across, axis) = grid(count, cdiv(units, n))
    amax_kernel.amax_rows[across](
        x.pointer,
        out.view(-1).view(torch.int32),
        offs,
        group,
        x.x.stride(0),
        units,
        0 if offs is None else offs.shape[0],
        IN_BF16=x.bf16,
        HAS_OFFS=offs is not None,
        HAS_GROUP=group is not None,
        ROW_AXIS=axis,
        N=n,
        CHUNKS=1,
        ASM=use_asm(x.x.device),
        num_warps=min(4, n // 64),
        enable_fp_fusion=False,
    )
    return out


def quantize_rows(
    x: Rows,
    fmt: Format,
    outer: int,
    amax: Tensor,
    group: Tensor | None,
    offs: Tensor | None,
    draw: Draw,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    values: Tensor | None = None,
    strides: tuple[int, int, int] | None = None,
    gated: Gated | None = None,
    place: Tensor | None = None,
    tile: tuple[int, int, int] | None = None,
    unit: int | None = None,
) -> None:
    """Quantise rows along their columns into `codes` and `scales`, into `values` [R, padded C], or into both.

    Args:
        gated: x holds gate and up beside each other, and their SwiGLU is what is quantised.
        place: int32 [R * k], the k rows of `values` that each row goes to.
        outer: OUTER_NONE, OUTER_ROW (amax [R] is written) or OUTER_GIVEN (it is read, at `group` or the row).
        strides: of a row of codes, in units, of a row of scales, and of an amax; None where all are dense.
        tile: (units of a tile, warps, tiles a program), to override what is chosen.
        unit: elements that a thread takes at a time, likewise.
    """
    count, width = x.x.shape
    width //= 2 if gated else 1
    unit = unit or unit_of(fmt)
    units = width // unit
    block_units = 0 if fmt.block_cols is None else fmt.block_cols // unit
    whole = outer == row_kernel.OUTER_ROW.value or block_units == 0
    n, warps, loops = tile or choose_tile(
        count, units, unit, whole, draw.stochastic, values is not None, gated is not None
    )
    n = max(n, block_units)
    loops = cdiv(units, n) if whole else loops
    tiles = 1 if whole else cdiv(units, n * loops)
    # A row narrower than a block still takes the whole block's units: no block holds parts of two rows.
    height = max(1, n // max(pow2(units), block_units)) if tiles * loops == 1 else 1
    across, axis = grid(count, tiles) if height == 1 else ((cdiv(count, height), 1), 0)
    plain = outer == row_kernel.OUTER_NONE.value and all(a is None for a in (gated, offs, values))
    if plain and not whole and tiles > 1 and units % n and units % block_units == 0 and width < 1 << 31:
        # The last tile of each row would be idle for the most part. Places in a row have 32 bits here.
        height, loops, across, axis = 0, 1, (cdiv(count * units, n), 1), 0
    out_bf16 = values is not None and values.dtype == torch.bfloat16
    code_stride, scale_stride, amax_stride = strides or (units, cdiv(units, max(1, block_units)), 1)
    row_kernel.quantize_rows[across](
        x.pointer,
        None if codes is None else codes.view(torch.int32),
        scales,
        values.view(torch.int32) if values is not None and out_bf16 else values,
        amax,
        draw.key,
        draw.rows,
        offs,
        group,
        None if gated is None else gated.factor,
        place,
        x.x.stride(0),
        x.columns if gated is None else width,
        0 if values is None else values.stride(0),
        code_stride,
        scale_stride,
        amax_stride,
        units,
        count,
        0 if offs is None else offs.shape[0],
        draw.tag,
        GATE_CAP=0.0 if gated is None else gated.gate_cap,
        UP_CAP=0.0 if gated is None else gated.up_cap,
        GATED=gated is not None,
        HAS_FACTOR=gated is not None and gated.factor is not None,
        CODES=codes is not None,
        COPIES=0 if place is None else place.numel() // count,
        E2M1=fmt.packed,
        ELEMENT_MAX=fmt.element_max,
        SCALE=SCALES[fmt.scale or "", fmt.scale_rule],
        BLOCK_UNITS=block_units,
        OUTER=outer,
        OUTER_MAX=fmt.outer_max or 0.0,
        OVER_SIX=fmt.four_over_six,
        STOCHASTIC=draw.stochastic,
        VALUES=values is not None,
        IN_BF16=x.bf16,
        OUT_BF16=out_bf16,
        HAS_ROWS=draw.rows is not None,
        HAS_OFFS=offs is not None,
        HAS_GROUP=group is not None,
        ALIGNED=(x.columns if gated is None else width) % 8 == 0,
        ROW_AXIS=axis,
        LOOPS=loops,
        HEIGHT=height,
        N=n,
        CHUNKS=unit // 8,
        ASM=use_asm(x.x.device),
        num_warps=warps,
        enable_fp_fusion=False,
    )


def choose_tile(
    rows: int, units: int, unit: int, whole: bool, stochastic: bool, values: bool, gated: bool
) -> tuple[int, int, int]:
    """(units of a tile, warps, tiles a program), as was fastest on an H200.

    Rows whose own amax comes first are read twice where they are several tiles, which then should fill them.
    A SwiGLU is not computed twice up to 8192 elements.
    """
    if gated:
        n = max(32, min(pow2(units), 512))
        return n, max(1, n // 64), 1
    if whole and unit == 16 and units > 128:
        n = _filling(units, 256 if stochastic else 512)
        return n, max(1, n // (64 if values or n <= 128 else 128)), 1
    few = values and not whole and not stochastic and rows * units * unit <= FEW_ELEMENTS
    each = 16 if few or (values and whole) else 32 if stochastic or (unit == 8 and not whole) else 64
    cap = (4096 if stochastic else 8192) // unit if whole else 128 * each // unit
    n = max(128, min(pow2(units), cap))
    warps = max(1, min(4, n * unit // (32 * each)))
    many = rows * units >= 4 * n * ENOUGH_PROGRAMS
    return n, warps, 4 if stochastic and unit == 16 and many and not whole and units >= 4 * n else 1


def _filling(units: int, most: int) -> int:
    """The largest tile that leaves no more than a sixteenth of a row's tiles idle; 32 units if none does."""
    n = min(most, pow2(units))
    while n > 32 and cdiv(units, n) * n > units + units // 16:
        n //= 2
    return n
