"""The chunked Mamba-2 scan on a CPU and its derivative: products of small matrices and passes between them.

Formulas: `nemotron_h/scan.py`; legend: `scan_passes.py`. A few sequences at a time go through buffers that
all layers share, so that they stay in the processor's cache.
"""

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.kernels.cpu.product import grouped_columns, grouped_rows
from nybble.kernels.cpu.scratch import fresh
from nybble.kernels.cpu.threads import split
from nybble.models.cpu import scan_passes as passes
from nybble.models.cpu import scan_states
from nybble.models.cpu.jit import floats

CHUNK = 64
"""Tokens of a chunk: pairs of tokens cost a number each, chunks a state each."""

TOKENS = 1024
"""Tokens that go through the buffers together, if sequences are shorter."""

LARGEST_KEPT = 1 << 24
"""Numbers in buffers that stay after a call, 64 MiB: those of long sequences are given back."""

_kept = threading.local()


class _Buffers:
    """Room for the chunks of some sequences, and the operations on them.

    `shape` is (H, P, G, N), heads, their width, groups and state.
    """

    def __init__(self, B: int, S: int, shape: tuple[int, int, int, int]) -> None:
        H, P, G, N = shape
        L = min(CHUNK, S)
        Z, W = B * -(-S // L), H // G * P
        self.u, self.near = torch.empty(Z, H, L, P), torch.empty(Z, H, L, P)
        self.ue, self.far = torch.empty(Z, G, L, W), torch.empty(Z, G, L, W)
        self.b, self.c = torch.empty(Z, G, L, N), torch.empty(Z, G, L, N)
        self.cum, self.enter, self.carry = torch.empty(Z, H, L), torch.empty(Z, H, L), torch.empty(Z, H)
        self.cb, self.m = torch.empty(Z, G, L, L), torch.empty(Z, H, L, L)
        self.states = torch.empty(Z, G, N, W)
        like = (self.u, self.ue, self.b, self.c, self.cb, self.states)
        self.du, self.due, self.db, self.dc, self.dcb, self.ds = (torch.empty_like(t) for t in like)

    @staticmethod
    def get(B: int, S: int, shape: tuple[int, int, int, int]) -> "_Buffers":
        """This thread's own, from the call before if that was alike."""
        key = (B, S, CHUNK, *shape)
        if getattr(_kept, "key", None) == key:
            kept: _Buffers = _kept.buffers
            return kept
        with torch.inference_mode(False):  # training may come after an evaluation in that mode
            new = _Buffers(B, S, shape)
        if sum(t.numel() for t in vars(new).values() if isinstance(t, Tensor)) <= LARGEST_KEPT:
            _kept.key, _kept.buffers = key, new
        return new

    def fill(self, xbc: Tensor, dt: Tensor, A: Tensor, starts: Any) -> None:
        """What both directions begin with."""
        arrays = [floats(t) for t in (xbc, dt, A)]
        made = (self.u, self.ue, self.b, self.c, self.cum, self.enter, self.carry)
        split(passes.arrange, self.u.shape[0], 4 * xbc.numel(), *arrays, starts, *(floats(t) for t in made))
        product(self.c, self.b.mT, self.cb)


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """a @ b over the last two of four axes, into `out`, or added to it."""
    Z, G, M, K = a.shape
    across, by_columns = not b.is_contiguous(), not a.is_contiguous()
    b = b.mT if across else b
    ends = _ends(Z * G, K if by_columns else M)
    if by_columns:
        grouped_columns(a.mT.reshape(-1, M), b.reshape(-1, b.shape[3]), ends, False, out.flatten(0, 1), add)
    else:
        grouped_rows(a.reshape(-1, K), b.flatten(0, 1), ends, across, out.view(-1, out.shape[3]), add)
    return out


@cache
def _ends(groups: int, size: int) -> Tensor:
    """Where groups of `size` rows end."""
    return torch.arange(size, size * groups + 1, size, dtype=torch.int32)


def _parts(B: int, S: int) -> Iterator[slice]:
    """Sequences that go together."""
    size = max(1, TOKENS // S)
    for start in range(0, B, size):
        yield slice(start, min(start + size, B))


def _rows(starts: Tensor | None, part: slice) -> Any:
    return np.empty((0, 0), dtype=np.int64) if starts is None else starts[part].contiguous().numpy()


def forward(
    xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, shape: tuple[int, int, int, int], starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [B, S, H * P], and the states before each chunk, [B * n, G, N, R * P]."""
    (B, S), (H, P, G, N) = xbc.shape[:2], shape
    xbc, dt = xbc.contiguous(), dt.contiguous()
    y = fresh(B, S, H * P)
    n = -(-S // min(CHUNK, S))
    prev = fresh(B * n, G, N, H // G * P)
    for part in _parts(B, S):
        count = part.stop - part.start
        r = _Buffers.get(count, S, shape)
        line, out = _rows(starts, part), prev[part.start * n : part.stop * n]
        r.fill(xbc[part], dt[part], A, line)
        split(passes.weigh, count * n * H, 8 * r.m.numel(), floats(r.cb), floats(r.cum), line, S, floats(r.m))
        product(r.m, r.u, r.near)
        product(r.b.mT, r.ue, r.states)
        given = floats(r.states), floats(r.carry), n, floats(out)
        split(scan_states.pass_on, count * G, 4 * out.numel(), *given)
        product(r.c, out, r.far)
        arrays = [floats(t) for t in (r.near, r.far, r.enter, xbc[part], D, y[part])]
        split(passes.join, count * n, 4 * y[part].numel(), *arrays)
    return y, prev


def backward(
    dy: Tensor,
    y: Tensor,
    prev: Tensor,
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    shape: tuple[int, int, int, int],
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dxbc, ddt [B, S, H], dA [H] and dD [H]."""
    (B, S), (H, _, G, _) = xbc.shape[:2], shape
    xbc, dt, dy = xbc.contiguous(), dt.contiguous(), dy.contiguous()
    n = -(-S // min(CHUNK, S))
    dxbc, ddt = fresh(*xbc.shape), fresh(*dt.shape)
    dA, dD, dlast = torch.empty(B * n, H), torch.empty(B * n, H), torch.empty(B * n, H)
    for part in _parts(B, S):
        count = part.stop - part.start
        r = _Buffers.get(count, S, shape)
        line, chunks = _rows(starts, part), slice(part.start * n, part.stop * n)
        before = prev[chunks]
        r.fill(xbc[part], dt[part], A, line)
        arrays = [floats(t) for t in (dy[part], r.enter, r.near, r.far)]
        split(passes.spread, count * n, 4 * dy[part].numel(), *arrays)
        product(r.near, r.u.mT, r.m)
        given = floats(r.cb), floats(r.cum)
        made = floats(r.m), floats(r.dcb)
        split(passes.weigh_backward, count * n * G, 8 * r.m.numel(), *given, line, S, *made)
        product(r.m.mT, r.near, r.du)
        product(r.c.mT, r.far, r.states)
        arrays = [floats(t) for t in (before, r.states, r.carry)]
        made = floats(r.ds), floats(dlast[chunks])
        split(scan_states.pass_on_backward, count * G, 4 * r.ds.numel(), *arrays, n, *made)
        product(r.b, r.ds, r.due)
        product(r.dcb.mT, r.c, r.db)
        product(r.ue, r.ds.mT, r.db, add=True)
        product(r.dcb, r.b, r.dc)
        product(r.far, before.mT, r.dc, add=True)
        inputs = [floats(t) for t in (dy[part], y[part], xbc[part], dt[part], A, D)]
        products = (r.cum, r.du, r.due, r.db, r.dc, dlast[chunks])
        outputs = (dxbc[part], ddt[part], dA[chunks], dD[chunks])
        arrays = [floats(t) for t in (*products, *outputs)]
        split(passes.collect, count * n, 8 * dy[part].numel(), *inputs, line, *arrays)
    return dxbc, ddt, dA.sum(0), dD.sum(0)
