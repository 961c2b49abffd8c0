"""Eight neighbouring elements at a time between memory and registers: eight tensors, one an element.

BF16 travels as int32 pairs, the first element in the low half. A thread that owns one entry of such tensors
moves 16 bytes a memory instruction.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, RET505 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.elements import bits, e4m3_value, top_bytes, value


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
    if BF16:
        p = tl.load(x_ptr + ((offset >> 1)[:, None] + four), mask=mask[:, None], other=0)
        return split4(p.to(tl.uint32, bitcast=True))
    else:
        low = tl.load(x_ptr + (offset[:, None] + four), mask=mask[:, None], other=0.0)
        high = tl.load(x_ptr + (offset[:, None] + (four + 4)), mask=mask[:, None], other=0.0)
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
            p = raw[k] & 0x7FFF7FFF
            out = out + (value(p << 16), value(p & 0xFFFF0000))
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
    """Maxima of the two unsigned halves of two uint32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def magnitude(raw, BF16: tl.constexpr, ASM: tl.constexpr):
    """Bits of the largest magnitude of eight elements, NaN above Inf: a pair of BF16, or FP32 (uint32)."""
    if BF16:
        a, b, c, d = raw
        low: tl.constexpr = 0x7FFF7FFF
        return max_pairs(max_pairs(a & low, b & low, ASM), max_pairs(c & low, d & low, ASM), ASM)
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
def magnitude_bits(m, BF16: tl.constexpr):
    """FP32 bits of a result of `magnitude`."""
    if BF16:
        return umax(m << 16, m & 0x7FFF0000)
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
def store_values(out_ptr, offset, v, mask, BF16: tl.constexpr, ASM: tl.constexpr):
    """Eight FP32 to `offset` (in elements), as BF16 pairs through an int32 pointer or as they are."""
    four = tl.arange(0, 4)[None, :]
    if BF16:
        p = join4(
            bf16_pair(v[0], v[1], ASM),
            bf16_pair(v[2], v[3], ASM),
            bf16_pair(v[4], v[5], ASM),
            bf16_pair(v[6], v[7], ASM),
        )
        tl.store(out_ptr + ((offset >> 1)[:, None] + four), p.to(tl.int32, bitcast=True), mask=mask[:, None])
    else:
        tl.store(out_ptr + (offset[:, None] + four), join4(v[0], v[1], v[2], v[3]), mask=mask[:, None])
        tl.store(out_ptr + (offset[:, None] + (four + 4)), join4(v[4], v[5], v[6], v[7]), mask=mask[:, None])


@triton.jit
def eight(v, first: tl.constexpr):
    """Eight entries of a tuple."""
    out = ()
    for j in tl.static_range(8):
        out = out + (v[first + j],)
    return out


@triton.jit
def store_values16(out_ptr, offset, v, mask, BF16: tl.constexpr, ASM: tl.constexpr):
    """Sixteen FP32 likewise. One store, which Triton brings to a dense layout through shared memory."""
    if BF16:
        p = ()
        for k in tl.static_range(8):
            p = p + (bf16_pair(v[2 * k], v[2 * k + 1], ASM),)
        at = (offset >> 1)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(out_ptr + at, join8(p).to(tl.int32, bitcast=True), mask=mask[:, None])
    else:
        store_values(out_ptr, offset, eight(v, 0), mask, BF16, ASM)
        store_values(out_ptr, offset + 8, eight(v, 8), mask, BF16, ASM)


@triton.jit
def load_nvfp4(codes_ptr, word, mask):
    """Eight E2M1 codes as a uint32."""
    return tl.load(codes_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def load_e4m3(scales_ptr, offset, mask, ASM: tl.constexpr):
    """FP32 values of E4M3 bytes."""
    byte = tl.load(scales_ptr + offset, mask=mask, other=0).to(tl.uint32)
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 e, f, z;
            .reg .b32 h;
            cvt.u16.u32 e, $1;
            cvt.rn.f16x2.e4m3x2 h, e;
            mov.b32 {f, z}, h;
            cvt.f32.f16 $0, f;
            }""",
            "=f,r",
            [byte],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return e4m3_value(byte)
