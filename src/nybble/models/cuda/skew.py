"""The learned bias of a tile of scores: products over distances, turned so that they lie over keys.

A tile has T queries a and T keys b and lies c tiles from the diagonal: its distances are c * T + a - b. The
profiles, times log2(e), are kept in chunks of T distances, `bank` [chunks * T, RP]: row w of chunk k is the
profile of distance (k - 1) * T + 1 + w, zeros where there is none. So keys b >= a find theirs in chunk c
("low"), the others in chunk c + 1 ("high"), and both at w = (a - b - 1) mod T. Turning each row of the tile
that holds `low` where w >= a, and `high` elsewhere, by that formula gives the bias; the same turn undoes it.
"""
# mypy: ignore-errors

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def fill_bank(
    proj, bank, extent, rs, es, T: tl.constexpr, R: tl.constexpr, RP: tl.constexpr
):  # fmt: skip
    """Program k: chunk k of the bank, of profiles [R, extent] with strides rs and es."""
    row, r = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, RP)
    distance = (row - (T - 1))[:, None]
    there = (distance >= 0) & (distance < extent) & (r < R)[None, :]
    x = tl.load(proj + r[None, :] * rs + distance * es, mask=there, other=0.0).to(tl.float32)
    tl.store(bank + row[:, None] * RP + r[None, :], (x * LOG2E).to(bank.dtype.element_ty))


@triton.jit
def turn(laps, T: tl.constexpr):
    """[T, T]: (row - column - 1) mod T.

    `laps`, any multiple of T unknown to the compiler, keeps these numbers from staying in registers from one
    step of a loop to the next, where they would crowd out tiles.
    """
    i = tl.arange(0, T)
    return ((i + laps - 1)[:, None] - i[None, :]) & (T - 1)


@triton.jit
def chunk(bank, k, T: tl.constexpr, RP: tl.constexpr):
    """Chunk k of the bank, [T, RP]."""
    row, r = tl.arange(0, T), tl.arange(0, RP)
    return tl.load(bank + (k * T + row)[:, None] * RP + r[None, :])


@triton.jit
def wall(k, window, T: tl.constexpr):
    """[T]: 0 for distances of chunk k that a query sees, -inf for the others."""
    distance = (k - 1) * T + 1 + tl.arange(0, T)
    # as unsigned numbers, those below zero lie beyond any window
    near = tl.cast(distance, tl.uint32, bitcast=True) < tl.cast(window, tl.uint32)
    return tl.where(near, 0.0, float("-inf"))


@triton.jit
def by_distance(rel_tile, profiles, k, window, T: tl.constexpr):
    """Bias of T queries for the distances of chunk k [T, T], -inf where a query does not see that far."""
    return tl.dot(rel_tile, tl.trans(profiles)) + wall(k, window, T)[None, :]


@triton.jit
def rows(x, first, S, stride, T: tl.constexpr, D: tl.constexpr, width: tl.constexpr):
    """Rows first..first + T of x [S, width] as [T, D], zeros beyond."""
    t, d = tl.arange(0, T), tl.arange(0, D)
    at = x + tl.cast(first, tl.int64) * stride + (t[:, None] * stride + d[None, :])
    mask = (first + t < S)[:, None]
    if width < D:
        mask = mask & (d < width)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def put_rows(x, values, first, S, stride, T: tl.constexpr, D: tl.constexpr, width: tl.constexpr):
    """Store [T, D] as rows first..first + T of x [S, width]."""
    t, d = tl.arange(0, T), tl.arange(0, D)
    at = x + tl.cast(first, tl.int64) * stride + (t[:, None] * stride + d[None, :])
    tl.store(at, values.to(x.dtype.element_ty), mask=(first + t < S)[:, None] & (d < width)[None, :])
