"""Rows of experts in NVFP4 codes times matrices in BF16 on Hopper: decoded on their way to the tensor cores.

As `bf16_rows.py`, but that four warps bring the rows: they load codes and scales of 128 rows, each wherever
it lies, and store the values, which BF16 holds exactly without their outer scale, to the rings in shared
memory. A quarter of the bytes of BF16 leave the L2 cache, and no values of rows are written or gathered
before.

Legend: see `bf16_rows.py`; T rows of codes.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 -- Gluon adds tuples but does not unpack them

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nybble.kernels.cuda.bf16_rows import CK, VALUES, group_at, rows_of_program, use
from nybble.kernels.cuda.fp8_sums import BN, HALF, following
from nybble.kernels.cuda.gluon_names import barrier, load_tile, view

BLOCKS = gl.constexpr(gl.BlockedLayout([1, 2], [16, 2], [4, 1], [1, 0]))  # of 16 features, four a chunk
ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
DECODE = gl.constexpr("""{
    .reg .b32 e, o, t, p, q, r, s;
    .reg .b16 a, b, c, d;
    .reg .f32 u, v, w, x;
    shl.b32 e, $4, 2;
    shl.b32 t, $4, 4;
    and.b32 e, e, 0x1C1C1C1C;
    lop3.b32 e, t, 0x80808080, e, 0xEA;
    shr.u32 o, $4, 2;
    and.b32 o, o, 0x1C1C1C1C;
    lop3.b32 o, $4, 0x80808080, o, 0xEA;
    mov.b32 {a, b}, e;
    cvt.rn.f16x2.e4m3x2 p, a;
    cvt.rn.f16x2.e4m3x2 q, b;
    mov.b32 {a, b}, o;
    cvt.rn.f16x2.e4m3x2 r, a;
    cvt.rn.f16x2.e4m3x2 s, b;
    mul.rn.f16x2 p, p, $5;
    mul.rn.f16x2 q, q, $5;
    mul.rn.f16x2 r, r, $5;
    mul.rn.f16x2 s, s, $5;
    mov.b32 {a, b}, p;
    mov.b32 {c, d}, r;
    cvt.f32.f16 u, a;
    cvt.f32.f16 v, b;
    cvt.f32.f16 w, c;
    cvt.f32.f16 x, d;
    cvt.rn.bf16x2.f32 $0, w, u;
    cvt.rn.bf16x2.f32 $1, x, v;
    mov.b32 {a, b}, q;
    mov.b32 {c, d}, s;
    cvt.f32.f16 u, a;
    cvt.f32.f16 v, b;
    cvt.f32.f16 w, c;
    cvt.f32.f16 x, d;
    cvt.rn.bf16x2.f32 $2, w, u;
    cvt.rn.bf16x2.f32 $3, x, v;
    }""")
FACTOR = gl.constexpr("""{
    .reg .b16 e, z;
    .reg .b32 h, k;
    mov.b32 k, 0x54005400;
    mad.lo.u32 h, $1, 256, $1;
    mov.b32 {e, z}, h;
    cvt.rn.f16x2.e4m3x2 h, e;
    mul.rn.f16x2 $0, h, k;
    }""")


@gluon.jit
def factor_of(byte):
    """A scale as `decode` takes it: a pair of FP16, 64 times as large."""
    return gl.inline_asm_elementwise(FACTOR, "=r,r", [byte], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def decode(word, factor):
    """Eight codes times their scale as four pairs of BF16, exact; see `nvfp4.py`."""
    return gl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r,r,r", [word, factor], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def load_chunks(codes_ptr, scales_ptr, source, STEPS: gl.constexpr):
    """Words and scales of 64 rows: for each chunk, first and second words and scale bytes of its blocks."""
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, BLOCKS))[None, :]
    codes_ptr += (source * (8 * STEPS))[:, None] + 2 * block
    scales_ptr += (source * (4 * STEPS))[:, None] + block
    chunks = ()
    for k in gl.static_range(STEPS):
        scale = gl.load(scales_ptr + 4 * k).to(gl.int32)
        chunks = chunks + ((gl.load(codes_ptr + 8 * k), gl.load(codes_ptr + (8 * k + 1)), scale),)
    return chunks


@gluon.jit
def store_chunk(chunk, buffer):
    """BF16 [64, CK] of a chunk."""
    factor = factor_of(chunk[2])
    a = decode(chunk[0], factor)
    b = decode(chunk[1], factor)
    # [64, block, word, pair / 2, pair % 2]
    even = gl.join(gl.join(a[0], b[0]), gl.join(a[2], b[2]))
    odd = gl.join(gl.join(a[1], b[1]), gl.join(a[3], b[3]))
    pairs = gl.reshape(gl.join(even, odd), (HALF, CK // 2))
    view(buffer, gl.int32, [HALF, CK // 2], PAIRS).store(gl.convert_layout(pairs, ROWS))


@gluon.jit
def source_rows(index_ptr, first, end, HAS_INDEX: gl.constexpr):
    """int64 [64]: which rows of the codes 64 rows are; the last one's behind the end."""
    row = gl.minimum(first + gl.arange(0, HALF, layout=gl.SliceLayout(1, BLOCKS)), end - 1)
    if HAS_INDEX:
        row = gl.load(index_ptr + row)
    return row.to(gl.int64)


@gluon.jit
def give(chunk, at, phase, a_bufs, ready, empty):
    """A chunk into a buffer of a ring, when that is free."""
    mbarrier.wait(empty.index(at), phase)
    store_chunk(chunk, a_bufs.index(at))
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(at), count=1)


@gluon.jit
def bring_decoded(
    codes_ptr, scales_ptr, index_ptr, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N,
    groups, HAS_INDEX: gl.constexpr, STEPS: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill both rings, and the chunks of each expert's matrix as they get free."""
    ends, n, row, stop = rows_of_program(offs_ptr, N, groups, G, 4)
    slot = 0
    phase = 1
    upper_slot = 0
    upper_phase = 1
    w_phase = 1
    while row < stop:
        group, end = group_at(ends, row, stop)
        for chunk in range(STEPS):
            bar = w_ready.index(chunk)
            mbarrier.wait(w_empty.index(chunk), w_phase)
            mbarrier.expect(bar, 2 * BN * CK)
            load_tile(w_desc, [group * N + n, chunk * CK], bar, w_bufs.index(chunk))
        w_phase ^= 1
        lower = source_rows(index_ptr, row, end, HAS_INDEX)
        upper = source_rows(index_ptr, row + HALF, end, HAS_INDEX)
        for first in range(row, end, 2 * HALF):
            low = load_chunks(codes_ptr, scales_ptr, lower, STEPS)
            high = load_chunks(codes_ptr, scales_ptr, upper, STEPS)
            lower = source_rows(index_ptr, first + 2 * HALF, end, HAS_INDEX)
            upper = source_rows(index_ptr, first + 3 * HALF, end, HAS_INDEX)
            for k in gl.static_range(STEPS):
                give(low[k], slot, phase, a_bufs, ready, empty)
                slot, phase = following(slot, phase, STAGES)
                if first + HALF < end:
                    give(high[k], STAGES + upper_slot, upper_phase, a_bufs, ready, empty)
                    upper_slot, upper_phase = following(upper_slot, upper_phase, STAGES)
        row = end


@gluon.jit
def product_of_codes(
    codes_ptr,  # int32 words of eight codes [T, C / 8]
    scales_ptr,  # E4M3 bytes [T, C / 16]
    index_ptr,  # int32 [R]: row of the codes of each row, with HAS_INDEX
    w_desc,  # BF16 [E * N, C]
    offs_ptr,  # int32 [E]
    out_desc,  # BF16 [R, N], whose tiles end at a row that is said
    N,
    groups,
    HAS_INDEX: gl.constexpr,
    STEPS: gl.constexpr,  # C / CK
    G: gl.constexpr,  # groups up to a power of two
    STAGES: gl.constexpr,
):
    """`bf16_rows.product_of_rows` of what the codes stand for, matrices transposed."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, HALF, CK], VALUES)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STEPS, BN, CK], VALUES)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], VALUES)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STEPS):
        mbarrier.init(w_ready.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (use, (
                offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, groups,
                0, True, STEPS, G, STAGES,
            )),
            (use, (
                offs_ptr, out_desc, out_bufs, a_bufs, w_bufs, ready, empty, w_ready, w_empty, N, groups,
                1, True, STEPS, G, STAGES,
            )),
            (bring_decoded, (
                codes_ptr, scales_ptr, index_ptr, w_desc, offs_ptr, a_bufs, w_bufs, ready, empty, w_ready,
                w_empty, N, groups, HAS_INDEX, STEPS, G, STAGES,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
