"""The Hadamard transform on GPUs: see `nybble.formats.hadamard`, whose bits it gives."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def stage(v, H: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """v[i], v[i + H] = v[i] + v[i + H], v[i] - v[i + H] for each i without bit H, of v [SIZE, N]."""
    pairs = tl.permute(tl.reshape(v, (SIZE // (2 * H), 2, H, N)), (0, 2, 3, 1))
    a, b = tl.split(pairs)
    pairs = tl.join(a + b, a - b)
    return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (SIZE, N))


@triton.jit
def transform_runs(
    x_ptr,
    sign_ptr,
    source_ptr,
    y_ptr,
    runs,
    length,
    across,
    x_lead,
    x_along,
    x_across,
    y_lead,
    y_along,
    y_across,
    HAS_SOURCE: tl.constexpr,
    BF16: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
):
    """One run of SIZE elements along the axis, of N neighbours across it.

    x is float32, float16, or BF16 as int16; signs float32 [SIZE]; source_ptr int64, the element along the
    axis that each place of y comes from, -1 for none; without one, its own. Strides are those of matrices,
    along the axis and across it, in elements.
    """
    program = tl.program_id(0)
    lead, run = (program // runs).to(tl.int64), program % runs
    i = tl.arange(0, SIZE)
    j = tl.program_id(1) * N + tl.arange(0, N)
    place = (run * SIZE + i).to(tl.int64)
    row = tl.load(source_ptr + place) if HAS_SOURCE else tl.where(place < length, place, -1)
    inside = (j < across)[None, :]
    wide = j.to(tl.int64)
    at = lead * x_lead + row[:, None] * x_along + wide[None, :] * x_across
    loaded = tl.load(x_ptr + at, mask=inside & (row >= 0)[:, None], other=0)
    v = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True) if BF16 else loaded.to(tl.float32)
    v = v * tl.load(sign_ptr + i)[:, None]
    v = stage(v, 1, SIZE, N)
    v = stage(v, 2, SIZE, N)
    v = stage(v, 4, SIZE, N)
    v = stage(v, 8, SIZE, N)
    if SIZE >= 32:
        v = stage(v, 16, SIZE, N)
    if SIZE >= 64:
        v = stage(v, 32, SIZE, N)
    if SIZE >= 128:
        v = stage(v, 64, SIZE, N)
    to = lead * y_lead + place[:, None] * y_along + wide[None, :] * y_across
    tl.store(y_ptr + to, v * FACTOR, mask=inside)
