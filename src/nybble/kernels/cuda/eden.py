"""MS-EDEN in Triton, a run of 128 at a time: see `nybble.formats.eden`, whose bits it gives.

A thread owns blocks of 16 whole, as the sums of a block go one element after the other; those of a run go
block by block over the first axis of a tile.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples, does not unpack them

import triton
import triton.language as tl

from nybble.kernels.cuda import scales as rule
from nybble.kernels.cuda.draws import block_words, load_key
from nybble.kernels.cuda.e2m1 import e2m1_magnitude, e2m1_nearest, e2m1_word
from nybble.kernels.cuda.e4m3 import e4m3_stochastic, e4m3_value
from nybble.kernels.cuda.elements import bits, value, with_sign
from nybble.kernels.cuda.registers import eight, sign_nibbles, umax

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(8)
"""Of a run."""


@triton.jit
def pairs(t, COUNT: tl.constexpr, N: tl.constexpr):
    """The even and the odd rows of t [2 * COUNT, N], [COUNT, N] each."""
    return tl.split(tl.permute(tl.reshape(t, (COUNT, 2, N)), (0, 2, 1)))


@triton.jit
def in_order(t, N: tl.constexpr):
    """[1, N]: the sum of the rows of t [8, N], one after the other."""
    even, odd = pairs(t, 4, N)
    even04, even26 = pairs(even, 2, N)
    odd15, odd37 = pairs(odd, 2, N)
    t0, t4 = pairs(even04, 1, N)
    t2, t6 = pairs(even26, 1, N)
    t1, t5 = pairs(odd15, 1, N)
    t3, t7 = pairs(odd37, 1, N)
    return t0 + t1 + t2 + t3 + t4 + t5 + t6 + t7


@triton.jit
def one_draw(e, key, tag):
    """The 16-bit draws of elements e (int64), uint32."""
    w0, w1, w2, w3 = block_words(e >> 3, key, tag)
    low = tl.where((e & 2) != 0, w1, w0)
    high = tl.where((e & 2) != 0, w3, w2)
    w = tl.where((e & 4) != 0, high, low)
    return tl.where((e & 1) != 0, w >> 16, w & 0xFFFF).to(tl.uint32)


@triton.jit(do_not_specialize=["runs", "length", "across", "width", "height", "groups", "tag"])
def eden_runs(
    x_ptr,  # FP32
    source_ptr,  # int64 [runs * 128]: the element along the axis of each place, -1 for none; or its own
    amax_ptr,
    group_ptr,  # int32: of each neighbour across the axis, or of each block; see GROUP_ACROSS, GROUP_BLOCK
    key_ptr,
    rows_ptr,
    offs_ptr,
    codes_ptr,  # int32 words
    scales_ptr,  # uint8
    values_ptr,  # FP32, or BF16 as int16, in the layout of x
    runs,
    length,  # along the axis
    across,
    width,  # columns of the logical tensor, by which draws are counted
    height,  # its rows
    groups,
    tag,  # layer << 8 | operand
    x_lead,
    x_along,
    x_across,
    amax_lead,
    amax_across,
    SHARE: tl.constexpr,
    OUTER_MAX: tl.constexpr,
    ALONG_ROWS: tl.constexpr,  # the axis is the last one
    HAS_SOURCE: tl.constexpr,
    GROUP_ACROSS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_OFFS: tl.constexpr,  # neighbours at or beyond the last end count as zeros
    CODES: tl.constexpr,
    VALUES: tl.constexpr,
    OUT_BF16: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """One run of N neighbours across the axis, of one of the matrices that x is."""
    tiles = tl.cdiv(across, N)
    program = tl.program_id(0)
    lead = (program // (tiles * runs)).to(tl.int64)
    run = program // tiles % runs
    j = (program % tiles).to(tl.int64) * N + tl.arange(0, N)[None, :]
    block = run.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = (j < across) & (block >= 0)  # [8, N]
    counted = inside
    if HAS_OFFS:
        counted = inside & (j < tl.load(offs_ptr + groups - 1))
    start = lead * x_lead + j * x_across
    x = ()
    at = ()
    present = ()
    m = tl.zeros((BLOCKS, N), tl.uint32)
    for i in tl.static_range(BLOCK):
        place = block * BLOCK + i
        row = tl.load(source_ptr + place) if HAS_SOURCE else tl.where(place < length, place, -1)
        at = at + (start + row * x_along,)
        present = present + (inside & (row >= 0),)
        v = tl.load(x_ptr + at[i], mask=counted & (row >= 0), other=0.0)
        x = x + (v,)
        m = umax(m, bits(v) & 0x7FFFFFFF)
    bad = m >= rule.INFINITE

    which = lead * amax_lead + j * amax_across + block * 0
    if GROUP_ACROSS:
        which += tl.load(group_ptr + j, mask=j < across, other=0)
    if GROUP_BLOCK:
        which += tl.load(group_ptr + block)
    s_enc = rule.encode_scale(tl.load(amax_ptr + which, mask=inside, other=0.0), OUTER_MAX)
    s_dec = tl.div_rn(tl.full((BLOCKS, N), 1.0, tl.float32), s_enc)
    byte, sf = rule.round_e4m3(value(m) * ((s_enc * SHARE) * (1.0 / 6.0)), ASM)
    mul = rule.e4m3_multiplier(sf, s_dec, ASM)

    t = ()
    squares = tl.zeros((BLOCKS, N), tl.float32)
    products = tl.zeros((BLOCKS, N), tl.float32)
    for i in tl.static_range(BLOCK):
        a = tl.abs(x[i])
        t = t + (e2m1_nearest(a * mul),)
        u = a * s_enc
        squares += u * u
        products += u * (e2m1_magnitude(t[i], False) * sf)
    squares = in_order(tl.where(bad, 0.0, squares), N)
    products = in_order(tl.where(bad, 0.0, products), N)
    correction = tl.where(products > 0.0, tl.div_rn(squares, products), 1.0)

    if ALONG_ROWS:
        name = tl.load(rows_ptr + j, mask=j < across, other=0) if HAS_ROWS else j
        e = name * width + block * BLOCK
    else:
        first = block * BLOCK
        if HAS_SOURCE:
            first = tl.maximum(tl.load(source_ptr + first), 0)
        if HAS_ROWS:
            first = tl.load(rows_ptr + first, mask=first < height, other=0)
        e = (lead * height + first) * width + j
    draw = one_draw(e, load_key(key_ptr), tag.to(tl.uint32))
    byte = (e4m3_stochastic(tl.minimum(sf * correction, 448.0), draw, False, ASM, True) >> 20) & 0xFF
    byte = tl.where(bad, 0x7F, byte).to(tl.uint32)

    stored = lead * across + j
    if CODES:
        tl.store(scales_ptr + (stored * (runs * BLOCKS) + block), byte.to(tl.uint8), mask=inside)
        for half in tl.static_range(2):
            signs = sign_nibbles(eight(x, 8 * half), False, ASM)
            word = tl.where(bad, 0, e2m1_word(eight(t, 8 * half), signs, False)).to(tl.uint32)
            word_at = stored * (runs * BLOCK) + block * 2 + half
            tl.store(codes_ptr + word_at, word.to(tl.int32, bitcast=True), mask=inside)
    if VALUES:
        scale = e4m3_value(byte)
        for i in tl.static_range(BLOCK):
            v = with_sign(e2m1_magnitude(t[i], False) * scale, x[i])
            if OUT_BF16:  # which holds it exactly
                tl.store(values_ptr + at[i], (bits(v) >> 16).to(tl.int16), mask=present[i])
            else:
                tl.store(values_ptr + at[i], v, mask=present[i])
