"""Results of `usual_blocks.rounded` as MXFP8 codes with the bytes of their scales, or as BF16 values."""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton adds tuples, does not unpack them, and wants an else after a return

import triton
import triton.language as tl

from nybble.kernels.cuda.e4m3 import e4m3_value, e4m3_word_stochastic
from nybble.kernels.cuda.elements import SIGN, bits, top_halves, value
from nybble.kernels.cuda.registers import join4
from nybble.kernels.cuda.sources import NVFP4, column_signs
from nybble.kernels.cuda.usual_blocks import LOWERED

EXPONENTS = tl.constexpr(0xFF80FF80)
"""Nine bits at the top of each half of a word."""


@triton.jit
def code_words(s, words, ASM: tl.constexpr):
    """Sixteen words of signed E4M3 bytes: of tokens 0 to 3 of each feature, then of 4 to 7."""
    out = ()
    for h in tl.static_range(2):
        raws = ((words[4 * h],), (words[4 * h + 1],), (words[4 * h + 2],), (words[4 * h + 3],))
        signs = column_signs(raws, 0, NVFP4, ASM)
        for j in tl.static_range(32 * h, 32 * h + 8):
            word = e4m3_word_stochastic(s[j], s[j + 8], s[j + 16], s[j + 24], signs[j - 32 * h], ASM)
            out = out + (word,)
    return out


@triton.jit
def scale_bytes(pairs):
    """Bytes of the scales in halves of words."""
    out = ()
    for k in tl.static_range(4):
        out = out + ((pairs[k] >> 7 & 0x01FF01FF) + LOWERED * 0x10001,)
    return out


@triton.jit
def value_factors(pairs):
    """Pairs of BF16: the scales of eight features, 2^120 times as large."""
    out = ()
    for k in tl.static_range(4):
        out = out + ((pairs[k] & EXPONENTS) + (120 + LOWERED << 7) * 0x10001,)
    return out


@triton.jit
def value_bits(s, factor):
    """FP32 bits of a result of `rounded` by its factor's."""
    return bits(e4m3_value(s >> 20 & 0x7F) * (value(factor) * 2.0**-120))


@triton.jit
def bf16_values(s, first: tl.constexpr, word, factors, ASM: tl.constexpr):
    """int32 [N, 4]: the pairs of BF16 of eight results of `rounded`, signed as the codes of `word`."""
    out = ()
    for k in tl.static_range(4):
        pair = top_halves(s[first + 2 * k], s[first + 2 * k + 1], ASM)
        if ASM:
            v = tl.inline_asm_elementwise(
                """{
                .reg .b32 t, p;
                shl.b32 t, $2, 4;
                prmt.b32 t, t, $2, $4;
                lop3.b32 p, $1, t, 0x7FF07FF0, 0xE4;
                mul.rn.bf16x2 $0, p, $3;
                }""",
                "=r,r,r,r,r",
                [pair, word, factors[k], tl.full(word.shape, 0x4000 + k * 0x1010, tl.uint32)],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
        else:
            low = value_bits(s[first + 2 * k], factors[k] << 16) | (word << (28 - 8 * k) & SIGN)
            high = value_bits(s[first + 2 * k + 1], factors[k] & 0xFFFF0000) | (word << (24 - 8 * k) & SIGN)
            v = low >> 16 | (high & 0xFFFF0000)
        out = out + (v,)
    return join4(out[0], out[1], out[2], out[3]).to(tl.int32, bitcast=True)
