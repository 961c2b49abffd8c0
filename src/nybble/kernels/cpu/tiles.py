"""The quantiser: tiles of rows, each cut into blocks; one kernel for every format, axis, rounding and output.

A tile is the rows that share scales. Along axis -1 it is one row (or the rows of a square block) and blocks
run along the row; along axis -2 it is one block's worth of rows and every column is a block of its own, so
that loads are contiguous and SIMD runs over columns. A tile is worked on a span of columns at a time, in
passes over scratch that stays in the first-level cache: each pass is a loop that LLVM vectorises.
"""

from typing import Any

import numpy as np

from nybble.kernels.cpu.bits import F32, U32, U64
from nybble.kernels.cpu.blocks import (
    add_errors,
    block_count,
    block_of,
    finite_amax,
    finite_amax_bf16,
    multiply,
    overwrite_bad,
    pack,
    raise_peaks,
    store_transposed,
    widen,
)
from nybble.kernels.cpu.decode import decode_row
from nybble.kernels.cpu.draws import fill_draws
from nybble.kernels.cpu.elements import (
    E2M1,
    nearest_codes,
    nearest_values,
    stochastic_codes,
    stochastic_values,
)
from nybble.kernels.cpu.jit import kernel
from nybble.kernels.cpu.scales import (
    RULE_E4M3,
    RULE_E8M0_FLOOR,
    RULE_FP32,
    e4m3_scales,
    e8m0_scales,
    fp32_scales,
    outer_scales,
    power_of_two,
)

SIX, FOUR, FINAL = 0, 1, 2  # passes over a tile: the two candidates of Four Over Six, then what is stored


@kernel
def amax_rows(first: int, last: int, columns: int, x: Any, halves: Any, amax: Any) -> None:
    """amax[r] = the largest finite |x[r]|, of float32 [R, columns] or, if there are any, BF16 `halves`."""
    for r in range(first, last):
        at = r * columns
        amax[r] = finite_amax_bf16(halves, at, columns) if halves.size else finite_amax(x, at, columns)


@kernel
def amax_columns(
    first: int, last: int, width: int, columns: int, at: int, rows: int, x: Any, amax: Any
) -> None:
    """amax[c] = the largest finite |x| of column c, over `rows` rows from position `at` on."""
    infinity = F32(np.inf)
    for strip in range(first, last):
        low = strip * width
        n = min(columns - low, width)
        for r in range(rows):
            base = at + r * columns + low
            for i in range(n):
                a = abs(x[U64(base + i)])
                k = U64(low + i)
                amax[k] = max(amax[k], a if a < infinity else F32(0))


@kernel
def quantize_tiles(
    first: int,
    last: int,
    columns: int,
    width: int,
    span: int,
    tiles: Any,
    tile_rows: int,
    x: Any,
    halves: Any,
    source: bool,
    source_codes: Any,
    source_packed: bool,
    code_table: Any,
    pair_table: Any,
    source_scales: Any,
    source_scales_fp32: Any,
    source_fp32: bool,
    scale_table: Any,
    source_shift: int,
    source_outer: Any,
    element: int,
    element_max: float,
    element_exponent: int,
    rule: int,
    shift: int,
    four_over_six: bool,
    outer_max: float,
    amax: Any,
    measure: bool,
    outer_pow2: bool,
    outer_per_column: bool,
    stochastic: bool,
    key: Any,
    rows: Any,
    want_values: bool,
    values: Any,
    transposed: bool,
    codes: Any,
    code_bytes: int,
    scales: Any,
    scales_fp32: Any,
    scale_columns: int,
) -> None:
    """Quantise work items first .. last - 1; an item is `width` columns of one tile, done `span` at a time.

    Args:
        tiles: int64 [n, 6]: first row; rows (<= tile_rows); leading index; position of its first row among
            the stored codes of a column; its index among the scales of a column, or its row of scales;
            index of its outer amax.
        x, halves: float32 [R, columns], flat, unless there are BF16 values in `halves`, as uint16.
        source: rows are decoded from source_* instead (see `decode.py`; each row has its own row of scales;
            source_outer float32 [R] is S_dec).
        shift: see `blocks.py`. width and span are multiples of a block, or cover the row.
        amax: float32, outer amaxes; written first if `measure` (a tile is a whole row), for a power of two as
            outer scale if outer_pow2. With outer_per_column, column c's is c behind the tile's.
        key: uint64 [6], see `fill_draws`; rows int64 [R] or [0]: the row index that names a row's draws.
        values: float32 [R, columns], flat, written if want_values; else codes, uint8 rows of code_bytes, and
            scales (float32 ones for RULE_FP32), rows of scale_columns; `transposed` stores columns as rows.
    """
    items_per_tile = (columns + width - 1) // width
    reach = min(span, columns)
    entries = block_count(reach, shift)
    peak = np.empty(entries, np.uint32)
    byte, byte4 = np.empty(entries, np.uint8), np.empty(entries, np.uint8)
    factor, factor4 = np.empty(entries, np.float32), np.empty(entries, np.float32)
    decoded, decoded4 = np.empty(entries, np.float32), np.empty(entries, np.float32)
    error, error4 = np.empty(entries, np.float32), np.empty(entries, np.float32)
    outer_amax = np.empty(entries, np.float32)
    s_enc, s_dec = np.empty(entries, np.float32), np.empty(entries, np.float32)
    scaled, rounded = np.empty(reach, np.float32), np.empty(reach, np.float32)
    tile_codes = np.empty((tile_rows if transposed else 1) * reach, np.uint8)
    words = np.empty(4 * ((reach >> 3) + 2), np.uint32)
    draws = words.view(np.uint16)
    staged = source or halves.size > 0  # rows of a tile become float32 in tile_x
    tile_x = np.empty(tile_rows * reach if staged else 1, np.float32)
    source_scale = np.empty(block_count(reach, source_shift), np.float32)
    source_bytes = (columns + 1) >> 1 if source_packed else columns
    source_blocks = block_count(columns, source_shift)
    row_x = tile_x if staged else x
    zero = np.int64(0)  # a literal would compile the passes once more

    for item in range(first, last):
        t = item // items_per_tile
        start, count, lead = tiles[t, 0], tiles[t, 1], tiles[t, 2]
        position, index, outer = tiles[t, 3], tiles[t, 4], tiles[t, 5]
        low = (item - t * items_per_tile) * width
        if measure:
            at = start * columns
            largest = finite_amax_bf16(halves, at, columns) if halves.size else finite_amax(x, at, columns)
            amax[outer] = power_of_two(largest, outer_max) if outer_pow2 else largest
        for c in range(low, min(columns, low + width), span):
            n = min(span, columns - c)
            nb = block_count(n, shift)

            for b in range(nb):
                peak[b] = U32(0)
            for i in range(count):
                r = start + i
                if source:
                    decode_row(
                        source_codes, r * source_bytes + (c >> 1 if source_packed else c), n, source_packed,
                        code_table, pair_table, source_scales, source_scales_fp32,
                        r * source_blocks + block_of(c, source_shift), source_fp32, scale_table, source_shift,
                        source_outer[r], source_scale, tile_x, i * reach,
                    )  # fmt: skip
                elif staged:
                    widen(halves, r * columns + c, n, tile_x, i * reach)
                raise_peaks(row_x, i * reach if staged else r * columns + c, n, shift, peak)

            if rule == RULE_E4M3:
                for b in range(nb):
                    outer_amax[b] = amax[outer + c + b if outer_per_column else outer]
                outer_scales(outer_amax, nb, outer_max, s_enc, s_dec)
                bad = e4m3_scales(peak, nb, F32(1), four_over_six, s_enc, s_dec, byte, factor, decoded)
            elif rule == RULE_FP32:
                bad = fp32_scales(peak, nb, element_max, decoded, factor)
            else:
                floor = rule == RULE_E8M0_FLOOR
                bad = e8m0_scales(
                    peak, nb, floor, F32(1 / element_max), element_exponent, byte, factor, decoded
                )
            if four_over_six:
                e4m3_scales(peak, nb, F32(1.5), four_over_six, s_enc, s_dec, byte4, factor4, decoded4)
                for b in range(nb):
                    error[b] = F32(0)
                    error4[b] = F32(0)

            for stage in range(SIX if four_over_six else FINAL, FINAL + 1):
                if four_over_six and stage == FINAL:
                    for b in range(nb):
                        if error4[b] < error[b]:
                            byte[b] = byte4[b]
                            factor[b] = factor4[b]
                            decoded[b] = decoded4[b]
                for i in range(count):
                    r = start + i
                    at = i * reach if staged else r * columns + c
                    multiply(row_x, at, n, factor4 if stage == FOUR else factor, shift, scaled, zero)
                    drawn = zero
                    if stochastic:
                        name = rows[r] if rows.size else r
                        drawn = fill_draws(U64(name) * U64(columns) + U64(c), n, key, words)
                    if want_values or stage != FINAL:
                        if stochastic:
                            stochastic_values(scaled, n, draws, drawn, element, rounded)
                        else:
                            nearest_values(scaled, n, element, rounded)
                        if stage == FINAL:
                            multiply(rounded, zero, n, decoded, shift, values, r * columns + c)
                        else:
                            four = stage == FOUR
                            add_errors(
                                rounded, row_x, at, n, decoded4 if four else decoded, outer_amax, outer_max,
                                shift, scaled, error4 if four else error,
                            )  # fmt: skip
                        continue
                    row_codes = i * reach if transposed else 0
                    if stochastic:
                        stochastic_codes(scaled, n, draws, drawn, element, tile_codes, row_codes)
                    else:
                        nearest_codes(scaled, n, element, tile_codes, row_codes)
                    if bad:
                        overwrite_bad(
                            tile_codes, row_codes, n, decoded, shift, 0 if element == E2M1 else 0x7F
                        )
                    if not transposed:
                        to = r * code_bytes + (c >> 1 if element == E2M1 else c)
                        if element == E2M1:
                            pack(tile_codes, n, codes, to)
                        else:
                            for j in range(n):
                                codes[U64(to + j)] = tile_codes[j]

            if want_values:
                continue
            if transposed:
                packed = element == E2M1
                to = (lead * columns + c) * code_bytes + (position >> 1 if packed else position)
                store_transposed(tile_codes, reach, count, n, packed, codes, to, code_bytes)
            first_block = block_of(c, shift)
            per_lead = block_count(columns, shift)
            for b in range(nb):
                if transposed:
                    to = (lead * per_lead + first_block + b) * scale_columns + index
                else:
                    to = index * scale_columns + first_block + b
                if rule == RULE_FP32:
                    scales_fp32[U64(to)] = decoded[b]
                else:
                    scales[U64(to)] = byte[b]
