"""Eight neighbouring elements at a time between memory and registers: eight tensors, one an element.

BF16 travels as int32 pairs, the first element in the low half. A thread that owns one entry of such tensors
moves 16 bytes a memory instruction.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits, top_bytes, value


@triton.jit
def split4(t):
    """[N, 4] to four [N]."""
    even, odd = tl.split(tl.reshape(t, (t.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def join4(a, b, c, d):
    """Four [N] to [N, 4]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))


@triton.jit
def join8(t):
    """Eight tensors as one with a last dimension of 8."""
    a = tl.join(
        tl.join(tl.join(t[0], t[4]), tl.join(t[2], t[6])), tl.join(tl.join(t[1], t[5]), tl.join(t[3], t[7]))
    )
    return tl.reshape(a, t[0].shape + (8,))


@triton.jit
def advance(ptr, elements, BF16: tl.constexpr):
    """A pointer, to pairs if BF16, moved by elements: an even number of them."""
    return ptr + (elements >> 1 if BF16 else elements)


@triton.jit
def load_raw(x_ptr, offset, mask, BF16: tl.constexpr):
    """Eight elements from `offset`, a multiple of 8: four uint32 of pairs, or eight FP32. 0 where masked."""
    four = tl.arange(0, 4)[None, :]
    at = advance(x_ptr, offset, BF16)[:, None]
    if BF16:
        p = tl.load(at + four, mask=mask[:, None], other=0)
        return split4(p.to(tl.uint32, bitcast=True))
    else:
        low = tl.load(at + four, mask=mask[:, None], other=0.0)
        high = tl.load(at + (four + 4), mask=mask[:, None], other=0.0)
        return split4(low) + split4(high)


@triton.jit
def floats(raw, BF16: tl.constexpr):
    """Eight FP32 of what `load_raw` returned."""
    if BF16:
        a, b, c, d = raw
        return (
            value(a << 16),
            value(a & 0xFFFF0000),
            value(b << 16),
            value(b & 0xFFFF0000),
            value(c << 16),
            value(c & 0xFFFF0000),
            value(d << 16),
            value(d & 0xFFFF0000),
        )
    else:
        return raw


@triton.jit
def magnitudes(raw, BF16: tl.constexpr):
    """The eight magnitudes, FP32."""
    if BF16:
        out = ()
        for k in tl.static_range(4):
            out = out + (tl.abs(value(raw[k] << 16)), value(raw[k] & 0x7FFF0000))
        return out
    else:
        out = ()
        for j in tl.static_range(8):
            out = out + (tl.abs(raw[j]),)
        return out


@triton.jit
def high_bytes(p, q, ASM: tl.constexpr):
    """Bytes 1 and 3 of p, then of q, in one uint32: what holds the signs of four BF16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [p, q], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (p >> 8 & 0xFF) | (p >> 16 & 0xFF00) | (q << 8 & 0xFF0000) | (q & 0xFF000000)


@triton.jit
def sign_bytes(raw, BF16: tl.constexpr, ASM: tl.constexpr):
    """Two uint32 whose bits 7, 15, 23, 31 are the signs of elements 0 to 3 and 4 to 7; others are noise."""
    if BF16:
        return high_bytes(raw[0], raw[1], ASM), high_bytes(raw[2], raw[3], ASM)
    else:
        return (
            top_bytes(bits(raw[0]), bits(raw[1]), bits(raw[2]), bits(raw[3]), ASM),
            top_bytes(bits(raw[4]), bits(raw[5]), bits(raw[6]), bits(raw[7]), ASM),
        )


@triton.jit
def even_odd_bytes(p, q, ASM: tl.constexpr):
    """Bytes 0, 2 of p and of q in one uint32, and bytes 1, 3."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531; }",
            "=&r,=r,r,r",
            [p, q],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        even = (p & 0xFF) | (p >> 8 & 0xFF00) | (q << 16 & 0xFF0000) | (q << 8 & 0xFF000000)
        return even, high_bytes(p, q, ASM)


@triton.jit
def sign_nibbles(raw, BF16: tl.constexpr, ASM: tl.constexpr):
    """A uint32 whose bit 4j + 3 is the sign of element j, its other bits 0."""
    low, high = sign_bytes(raw, BF16, ASM)
    even, odd = even_odd_bytes(low, high, ASM)
    return (even >> 4 & 0x08080808) | (odd & 0x80808080)


@triton.jit
def max_pairs(a, b, ASM: tl.constexpr):
    """Pairs of BF16 whose magnitudes are the larger of two pairs' (NaN above Inf); their signs are noise."""
    if ASM:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [a, b],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.maximum(a & 0x7FFF, b & 0x7FFF) | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)


@triton.jit
def magnitude(raw, BF16: tl.constexpr, ASM: tl.constexpr):
    """The largest magnitude of eight elements, NaN above Inf: a result of `max_pairs`, or FP32 bits."""
    if BF16:
        a, b, c, d = raw
        return max_pairs(max_pairs(a, b, ASM), max_pairs(c, d, ASM), ASM)
    else:
        m = bits(raw[0]) & 0x7FFFFFFF
        for j in tl.static_range(1, 8):
            m = umax(m, bits(raw[j]) & 0x7FFFFFFF)
        return m


@triton.jit
def umax(a, b):
    """Maximum of two uint32 below 2^31."""
    return tl.maximum(a.to(tl.int32), b.to(tl.int32)).to(tl.uint32)


@triton.jit
def max_magnitudes(a, b, BF16: tl.constexpr, ASM: tl.constexpr):
    """The larger of two results of `magnitude`."""
    if BF16:
        return max_pairs(a, b, ASM)
    else:
        return umax(a, b)


@triton.jit
def pair_bits(m):
    """FP32 bits of the two magnitudes of a result of `max_pairs`."""
    return (m & 0x7FFF) << 16, m & 0x7FFF0000


@triton.jit
def magnitude_bits(m, BF16: tl.constexpr):
    """FP32 bits of a result of `magnitude`."""
    if BF16:
        low, high = pair_bits(m)
        return umax(low, high)
    else:
        return m


@triton.jit
def finite_magnitude(raw, BF16: tl.constexpr):
    """FP32 bits of the largest finite magnitude of eight elements."""
    x = floats(raw, BF16)
    m = bits(x[0]) & 0
    for j in tl.static_range(8):
        b = bits(x[j]) & 0x7FFFFFFF
        m = umax(m, tl.where(b >= 0x7F800000, 0, b).to(tl.uint32))
    return m


@triton.jit
def bf16_pair(low, high, ASM: tl.constexpr):
    """Two FP32 rounded to nearest even as a pair."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return bf16_bits(low) | (bf16_bits(high) << 16)


@triton.jit
def bf16_bits(x):
    """FP32 rounded to nearest even, as BF16 bits in a uint32."""
    b = bits(x)
    r = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, r).to(tl.uint32)


@triton.jit
def times(raw, factor, BF16: tl.constexpr, ASM: tl.constexpr):
    """What `load_raw` returned times a factor, in the same type."""
    x = floats(raw, BF16)
    out = ()
    if BF16:
        for k in tl.static_range(4):
            out = out + (bf16_pair(x[2 * k] * factor, x[2 * k + 1] * factor, ASM),)
    else:
        for j in tl.static_range(8):
            out = out + (x[j] * factor,)
    return out


@triton.jit
def eight(v, first: tl.constexpr):
    """Eight entries of a tuple."""
    out = ()
    for j in tl.static_range(8):
        out = out + (v[first + j],)
    return out
