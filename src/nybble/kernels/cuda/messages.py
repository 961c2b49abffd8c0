"""Rows of messages in another order, back to values, and their sums. Their layout: `kernels/messages.py`."""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples but does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.decode import eight_values
from nybble.kernels.cuda.stores import store_values
from nybble.kernels.cuda.units import flat, of_row


@triton.jit(do_not_specialize=["count", "words", "row_units", "row_bytes", "scale_start", "amax_start"])
def unpack_rows(
    codes_ptr,  # the message as int32 words
    bytes_ptr,  # the message as bytes
    amax_ptr,  # the message as FP32
    places_ptr,  # int32 [T, PARTS]
    values_ptr,
    count,  # T
    words,  # of eight elements, in a row
    row_units,  # of eight codes, from row to row
    row_bytes,
    scale_start,  # bytes
    amax_start,  # FP32 numbers
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,  # of eight elements, in a block
    PARTS: tl.constexpr,  # 0: row t of the message is row t of the result
    OUTER_MAX: tl.constexpr,  # 0: no outer scale
    OUT_BF16: tl.constexpr,
    FLAT: tl.constexpr,  # tiles go on from row to row
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Row t of the values: the sum of PARTS rows of the message, in FP32 and in order."""
    if FLAT:
        t, w = flat(tl.program_id(0), tl.arange(0, N), words, N)
        inside = t < count
    else:
        t = tl.program_id(0).to(tl.int64)
        w = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
        inside = w < words
    total = ()
    for j in tl.static_range(1 if PARTS == 0 else PARTS):
        row = t
        mask = inside
        if PARTS > 0:
            row = of_row(places_ptr + j, t * PARTS, inside, FLAT).to(tl.int64)
            mask = inside & (row >= 0)
        at = row * row_bytes + scale_start + w // BLOCK_WORDS
        q = eight_values(codes_ptr, row * row_units + w, bytes_ptr, at, mask, E2M1, SCALE, ASM)
        s_dec = 1.0
        if OUTER_MAX > 0:
            present = mask if FLAT else row >= 0
            amax = tl.load(amax_ptr + (row * (row_bytes // 4) + amax_start), mask=present, other=0.0)
            s_dec = tl.div_rn(1.0, rule.encode_scale(amax, OUTER_MAX))
        v = ()
        for i in tl.static_range(8):
            x = q[i] * s_dec if OUTER_MAX > 0 else q[i]
            if PARTS > 0:
                x = x + (0.0 if j == 0 else total[i])  # a row that is not there was read as zeros
            v = v + (x,)
        total = v
    store_values(values_ptr, (t * words + w) * 8, total, inside, OUT_BF16, ASM)


@triton.jit(do_not_specialize=["count", "units"])
def take_rows(
    message_ptr,  # int32 words
    index_ptr,  # int64 [R]
    out_ptr,  # int32 words
    count,  # R
    units,  # of WORDS, in a row
    WORDS: tl.constexpr,
    N: tl.constexpr,
):
    """Row r of the result: row index[r] of the message."""
    r, u = flat(tl.program_id(0), tl.arange(0, N), units, N)
    mask = r < count
    source = tl.load(index_ptr + r, mask=mask, other=0)
    word = tl.arange(0, WORDS)[None, :]
    values = tl.load(message_ptr + (((source * units + u) * WORDS)[:, None] + word), mask=mask[:, None])
    tl.store(out_ptr + (((r * units + u) * WORDS)[:, None] + word), values, mask=mask[:, None])
