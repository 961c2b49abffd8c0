"""Registers to memory: values, as pairs of BF16 or FP32, and words of codes."""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.registers import advance, bf16_pair, eight, join4, join8


@triton.jit
def bf16_pairs(v, COUNT: tl.constexpr, ASM: tl.constexpr):
    """COUNT pairs of twice as many FP32."""
    out = ()
    for k in tl.static_range(COUNT):
        out = out + (bf16_pair(v[2 * k], v[2 * k + 1], ASM),)
    return out


@triton.jit
def store_pairs(out_ptr, offset, p, mask, COUNT: tl.constexpr):
    """4 or 8 pairs of BF16 to `offset` (in elements), through an int32 pointer.

    Eight go in one store, which Triton brings to a dense layout through shared memory.
    """
    at = advance(out_ptr, offset, True)[:, None] + tl.arange(0, COUNT)[None, :]
    joined = join4(p[0], p[1], p[2], p[3]) if COUNT == 4 else join8(p)
    tl.store(at, joined.to(tl.int32, bitcast=True), mask=mask[:, None])


@triton.jit
def store_values(out_ptr, offset, v, mask, BF16: tl.constexpr, ASM: tl.constexpr):
    """Eight FP32 to `offset` (in elements), as BF16 pairs through an int32 pointer or as they are."""
    if BF16:
        store_pairs(out_ptr, offset, bf16_pairs(v, 4, ASM), mask, 4)
    else:
        at = advance(out_ptr, offset, False)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(at, join4(v[0], v[1], v[2], v[3]), mask=mask[:, None])
        tl.store(at + 4, join4(v[4], v[5], v[6], v[7]), mask=mask[:, None])


@triton.jit
def anchor(ptr, start, BF16: tl.constexpr, EACH: tl.constexpr):
    """(pointer, start) to count elements from: what all units share goes into the pointer.

    What is left to add to it has 32 bits.
    """
    if EACH:
        return ptr, start
    else:
        return advance(ptr, start, BF16), 0


@triton.jit
def store_unit(
    values_ptr,
    start,
    u,
    values,
    mask,
    PAIRS: tl.constexpr,
    OUT_BF16: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """The values of units u of the row that begins at `start`: FP32, or PAIRS of BF16 already."""
    at = start + u * (8 * CHUNKS)
    if OUT_BF16 and CHUNKS <= 2:
        pairs = values
        if not PAIRS:
            pairs = bf16_pairs(values, 4 * CHUNKS, ASM)
        store_pairs(values_ptr, at, pairs, mask, 4 * CHUNKS)
    else:
        for c in tl.static_range(CHUNKS):
            store_values(values_ptr, at + 8 * c, eight(values, 8 * c), mask, OUT_BF16, ASM)


@triton.jit
def store_words(codes_ptr, index, words, mask, COUNT: tl.constexpr):
    """COUNT uint32 of each unit to int32 memory, `index` the first."""
    if COUNT == 1:
        tl.store(codes_ptr + index, words[0].to(tl.int32, bitcast=True), mask=mask)
    elif COUNT == 2:
        at = index[:, None] + tl.arange(0, 2)[None, :]
        tl.store(codes_ptr + at, tl.join(words[0], words[1]).to(tl.int32, bitcast=True), mask=mask[:, None])
    else:
        at = index[:, None] + tl.arange(0, 4)[None, :]
        for k in tl.static_range(COUNT // 4):
            w = join4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
            tl.store(codes_ptr + (at + 4 * k), w.to(tl.int32, bitcast=True), mask=mask[:, None])
