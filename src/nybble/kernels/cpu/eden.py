"""MS-EDEN on the stored layout, a run of 128 at a time; see `nybble.formats.eden`, whose bits it gives."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.formats import blocks, eden, grouped
from nybble.formats import outer as outer_scale
from nybble.kernels.cpu.bits import F32, U32, U64
from nybble.kernels.cpu.blocks import block_count, multiply, overwrite_bad, pack, raise_peaks
from nybble.kernels.cpu.draws import fill_draws
from nybble.kernels.cpu.elements import E2M1, E4M3, nearest_codes, nearest_values, stochastic_codes
from nybble.kernels.cpu.jit import kernel
from nybble.kernels.cpu.job import Job, key_words, outer_amax, rows_of
from nybble.kernels.cpu.scales import NAN_E4M3, e4m3_scales
from nybble.kernels.cpu.source import flat
from nybble.kernels.cpu.threads import split

RUN = eden.RUN
BLOCK = 16
SHARE = F32(eden.SHARE)


def quantize(job: Job, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and outer amax of x."""
    fmt, down = job.fmt, job.axis == -2
    x = x.detach().to(torch.float32)
    where = None
    if job.offs is not None:
        x = grouped.zero_outside(x, job.offs)
        where = grouped.packing(fmt, job.offs, x.shape[0]) if down else None
    amax = eden.outer_amax(outer_amax(job, rows_of(x)))
    if fmt.outer_pow2:
        amax = outer_scale.power_of_two(fmt, amax)
    values = grouped.pack_columns(x, where) if where is not None else x.transpose(-1, -2) if down else x
    stored = values.shape
    codes = torch.zeros(blocks.code_shape(fmt, stored), dtype=torch.uint8)
    scales = torch.zeros(blocks.scale_shape(fmt, stored), dtype=torch.uint8)
    if values.numel() == 0:
        return codes, scales, amax
    spread = outer_scale.spread(amax, job.outer, job.shape, job.offs, where)
    s_enc = outer_scale.encode_scale(fmt, spread).expand(stored)[..., ::BLOCK]
    rows = values.numel() // stored[-1]
    split(
        eden_rows, rows, values.numel(), stored[-1], flat(values), flat(s_enc), key_words(job),
        _first_elements(job, where), job.shape[-1], stored[-2] if down else rows, down,
        flat(codes), codes.shape[-1], flat(scales), scales.shape[-1],
    )  # fmt: skip
    return codes, scales, amax


def _first_elements(job: Job, where: grouped.Packing | None) -> Any:
    """int64: the index that draws use of each logical row, or of each block's first row along axis -2."""
    rows = job.shape[-2] if len(job.shape) > 1 else 1
    names = torch.arange(job.shape[:-1].numel()) if job.rows is None else job.rows.to(torch.int64)
    if job.axis == -1:
        return flat(names)
    if where is None:
        return flat(names.view(-1, rows)[:, ::BLOCK])
    placed = names.new_zeros(where.size + 1)
    placed[where.column] = names
    return flat(placed[: where.size : BLOCK])


@kernel
def eden_rows(
    first: int,
    last: int,
    columns: int,
    x: Any,
    s_enc: Any,
    key: Any,
    names: Any,
    width: int,
    rows_per_lead: int,
    down: bool,
    codes: Any,
    code_bytes: int,
    scales: Any,
    scale_columns: int,
) -> None:
    """Stored rows first .. last - 1 of x [R, columns], flat.

    Args:
        s_enc: float32 [R, scale_columns].
        key: see `fill_draws`. names, width: the first element of a block is names[its row] * width + its
            column. rows_per_lead, down: stored rows are the columns of the logical tensor, so many a matrix.
    """
    per_run = RUN // BLOCK
    runs = (columns + RUN - 1) // RUN
    peak = np.empty(per_run, np.uint32)
    byte, scaled_byte = np.empty(per_run, np.uint8), np.empty(per_run, np.uint8)
    factor, decoded = np.empty(per_run, np.float32), np.empty(per_run, np.float32)
    outer, new = np.empty(per_run, np.float32), np.empty(per_run, np.float32)
    enc, dec = np.empty(per_run, np.float32), np.empty(per_run, np.float32)
    scaled, rounded = np.empty(RUN, np.float32), np.empty(RUN, np.float32)
    run_codes = np.empty(RUN, np.uint8)
    words = np.empty(8, np.uint32)
    halves = words.view(np.uint16)
    draws = np.empty(per_run, np.uint16)
    zero = np.int64(0)
    for r in range(first, last):
        for run in range(runs):
            low = run * RUN
            at = r * columns + low
            n = min(RUN, columns - low)
            nb = block_count(n, 0)
            for b in range(nb):
                peak[b] = U32(0)
                outer[b] = s_enc[U64(r * scale_columns + run * per_run + b)]
                enc[b] = outer[b] * SHARE
                dec[b] = F32(1) / outer[b]
            raise_peaks(x, at, n, 0, peak)
            bad = e4m3_scales(peak, nb, F32(1), False, enc, dec, byte, factor, decoded)
            multiply(x, at, n, factor, 0, scaled, zero)
            nearest_values(scaled, n, E2M1, rounded)
            squares, products = F32(0), F32(0)
            for b in range(nb):
                if decoded[b] != decoded[b]:
                    continue
                square, product = F32(0), F32(0)
                for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
                    u = x[U64(at + i)] * outer[b]
                    square += u * u
                    product += u * (rounded[i] * decoded[b])
                squares += square
                products += product
            correction = squares / products if products > F32(0) else F32(1)
            for b in range(nb):
                new[b] = decoded[b] * correction
                block = run * per_run + b
                if down:
                    lead = r // rows_per_lead
                    name = names[U64(lead * scale_columns + block)]
                    element = U64(name) * U64(width) + U64(r - lead * rows_per_lead)
                else:
                    element = U64(names[U64(r)]) * U64(width) + U64(block * BLOCK)
                draws[b] = halves[U64(fill_draws(element, 1, key, words))]
            stochastic_codes(new, nb, draws, zero, E4M3, scaled_byte, zero)
            for b in range(nb):
                is_bad = decoded[b] != decoded[b]
                scales[U64(r * scale_columns + run * per_run + b)] = NAN_E4M3 if is_bad else scaled_byte[b]
            nearest_codes(scaled, n, E2M1, run_codes, zero)
            if bad:
                overwrite_bad(run_codes, zero, n, decoded, 0, 0)
            pack(run_codes, n, codes, r * code_bytes + (low >> 1))
