"""Philox4x32-10 in Triton: one call serves eight neighbours. Its counter: see `formats/philox.py`."""
# mypy: ignore-errors
# ruff: noqa: RET505 -- Triton wants an else after a return

import triton
import triton.language as tl


@triton.jit
def product(a, M: tl.constexpr, ASM: tl.constexpr):
    """The lower and the upper word of a * M. With ASM that of a tensor stays one instruction."""
    if ASM and a.type.is_block():
        return tl.inline_asm_elementwise(
            "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p; }",
            "=r,=r,r,r",
            [a, tl.full(a.shape, M, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        p = a.to(tl.uint64) * M
        return p.to(tl.uint32), (p >> 32).to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, ASM: tl.constexpr = False):
    """The four output words (uint32). What is the same for a whole program is best passed as scalars."""
    for _ in tl.static_range(10):
        a_low, a_high = product(c0, 0xD2511F53, ASM)
        b_low, b_high = product(c2, 0xCD9E8D57, ASM)
        c0 = b_high ^ c1 ^ k0
        c2 = a_high ^ c3 ^ k1
        c1 = b_low
        c3 = a_low
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def load_key(key_ptr):
    """(k0, k1, micro << 16, step) as uint32 and first >> 3, from int64 [4] (seed, step, micro, first)."""
    seed = tl.load(key_ptr)
    step = tl.load(key_ptr + 1)
    micro = tl.load(key_ptr + 2)
    low: tl.constexpr = 0xFFFFFFFF
    k0 = (seed & low).to(tl.uint32)
    k1 = ((seed >> 32) & low).to(tl.uint32)
    part = tl.load(key_ptr + 3) >> 3
    return k0, k1, ((micro & 0xFFFF) << 16).to(tl.uint32), (step & low).to(tl.uint32), part


@triton.jit
def block_words(g, key, tag):
    """Philox words of block g (int64): draws of elements 8 g to 8 g + 7, two a word, the first one low."""
    k0, k1, micro, step, part = key
    g = g + part
    c0 = (g & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((g >> 32) & 0xFFFF).to(tl.uint32) | micro
    return philox(c0, c1, step, tag, k0, k1)


@triton.jit
def draw_words(start, offset, key, tag, ALIGNED: tl.constexpr):
    """Words of the draws of eight elements from start (int64) + offset (int32); ALIGNED: multiples of 8."""
    if ALIGNED:
        return block_words((start >> 3) + (offset >> 3), key, tag)
    else:
        e = start + offset
        # Eight elements out of two blocks: 256 bits shifted right by 16 for each element to be skipped.
        a0, a1, a2, a3 = block_words(e >> 3, key, tag)
        a4, a5, a6, a7 = block_words((e >> 3) + 1, key, tag)
        four, two, one = (e & 4) != 0, (e & 2) != 0, (e & 1) != 0
        a0 = tl.where(four, a2, a0)
        a1 = tl.where(four, a3, a1)
        a2 = tl.where(four, a4, a2)
        a3 = tl.where(four, a5, a3)
        a4 = tl.where(four, a6, a4)
        a5 = tl.where(four, a7, a5)
        a0 = tl.where(two, a1, a0)
        a1 = tl.where(two, a2, a1)
        a2 = tl.where(two, a3, a2)
        a3 = tl.where(two, a4, a3)
        a4 = tl.where(two, a5, a4)
        w0 = tl.where(one, (a0 >> 16) | (a1 << 16), a0)
        w1 = tl.where(one, (a1 >> 16) | (a2 << 16), a1)
        w2 = tl.where(one, (a2 >> 16) | (a3 << 16), a2)
        w3 = tl.where(one, (a3 >> 16) | (a4 << 16), a3)
        return w0, w1, w2, w3
