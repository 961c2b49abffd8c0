"""Launches the kernels of attention with a learned relative bias; `models.inkling2.attend` has the formula.

Inputs are read as the layer has them, [B, S, heads, size], by their strides; results are contiguous. Two runs
give the same bits: no kernel adds by atomics. Legend: B sequences, S tokens, H heads, h key heads, D head
size, R weights of the profiles `proj` [R, extent].
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from nybble.kernels.cuda.jit import cdiv
from nybble.kernels.cuda.reasons import device as device_reason
from nybble.models.cuda import attend_backward, attend_forward
from nybble.models.cuda.skew import fill_bank
from nybble.models.cuda.sums import add
from nybble.models.documents import Documents


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: tokens of a tile, warps of a program, tiles of a loop that are in flight, and the
    most registers of a thread, where that should be less than fit."""

    tokens: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int | None]:
        """For Triton's launch."""
        sizes = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        return {**sizes, "enable_fp_fusion": True}


# by head size: those that are served
FORWARD = {32: Tile(64, 4, 2), 64: Tile(64, 4, 2, 168)}
QUERIES = {32: Tile(64, 4, 2), 64: Tile(64, 4, 2)}
KEYS = {32: Tile(64, 4, 2), 64: Tile(64, 4, 2)}


@cache
def reason(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], d_rel: int) -> str | None:
    """Why these kernels cannot serve heads of these sizes, in a few words; None if they can."""
    if wrong := [size for size in sizes if size not in FORWARD]:
        return f"heads of {wrong[0]} have no attention kernel, only those of {', '.join(map(str, FORWARD))}"
    if d_rel > 16:
        return f"{d_rel} weights of bias profiles have no attention kernel, only up to 16"
    if dtype != torch.bfloat16:
        return f"the attention kernels take bfloat16, not {str(dtype).removeprefix('torch.')}"
    return device_reason(device)


def bank_of(proj: Tensor, T: int, dtype: torch.dtype) -> Tensor:
    """`proj` [R, extent] for scores in base 2, in chunks of T distances, [chunks * T, RP]; see `skew`."""
    R, extent = proj.shape
    chunks = cdiv(extent - 1, T) + 2
    bank = torch.empty(chunks * T, _padded(R), dtype=dtype, device=proj.device)
    fill_bank[(chunks,)](proj, bank, extent, *proj.stride(), T, R, bank.shape[1], enable_fp_fusion=True)
    return bank


def forward(
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, proj: Tensor, sink: Tensor,
    documents: Documents | None, window: int | None, scale: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result [B, S, H, D], and the logarithm to base 2 of each softmax's sum [B, H, S] FP32."""
    B, S, H, D = q.shape
    q, k, v, rel = (_rows(x) for x in (q, k, v, rel))
    tile = tile or FORWARD[D]
    T = tile.tokens
    bank = bank_of(proj, T, q.dtype)
    out = torch.empty(B, S, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    segments, first, _ = _documents(documents, lse)
    attend_forward.forward[B * H, cdiv(S, T)](
        q, k, v, rel, bank, sink, segments, first, out, lse,
        S, H, H // k.shape[2], T, bank.shape[0] // T, window or S,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *rel.stride()[:3], *sink.stride(), scale,
        T, D, rel.shape[3], bank.shape[1], _far(S, window, bank.shape[0] // T, T), documents is not None,
        **tile.options(),
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, proj: Tensor, sink: Tensor,
    documents: Documents | None, window: int | None, scale: float,
    query_tile: Tile | None = None, key_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, rel, proj and sink, contiguous, each in its own dtype."""
    B, S, H, D = q.shape
    h, R, extent = k.shape[2], rel.shape[3], proj.shape[1]
    q, k, v, rel, dout = (_rows(x) for x in (q, k, v, rel, dout))
    dq, dk, dv, drel, dsink = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, rel, sink)
    )
    delta = torch.empty_like(lse)
    segments, first, last = _documents(documents, lse)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *rel.stride()[:3])

    tile = query_tile or QUERIES[D]
    T, tiles = tile.tokens, cdiv(S, tile.tokens)
    bank = bank_of(proj, T, q.dtype)
    RP, chunks = bank.shape[1], bank.shape[0] // T
    partial = torch.empty(1, tiles * B * H, (chunks - 1) * T, RP, dtype=torch.float32, device=q.device)
    attend_backward.queries[B * H, tiles](
        q, k, v, rel, bank, sink, segments, first, out, lse, dout, dq, drel, dsink, delta, partial,
        S, H, H // h, T, chunks, window or S,
        *strides, *sink.stride(), *dout.stride()[:3], scale,
        T, D, R, RP, _far(S, window, bank.shape[0] // T, T), documents is not None, **tile.options(),
    )  # fmt: skip
    dproj = add(partial)[0][T - 1 : T - 1 + extent, :R].T.to(
        proj.dtype, memory_format=torch.contiguous_format
    )

    tile = key_tile or KEYS[D]
    if tile.tokens != T:
        T, tiles = tile.tokens, cdiv(S, tile.tokens)
        bank = bank_of(proj, T, q.dtype)
    attend_backward.keys[B * h, tiles](
        q, k, v, rel, bank, segments, last, lse, delta, dout, dk, dv,
        S, H, H // h, T, bank.shape[0] // T, window or S, tiles,
        *strides, *dout.stride()[:3], scale,
        T, D, R, RP, _far(S, window, bank.shape[0] // T, T), documents is not None, **tile.options(),
    )  # fmt: skip
    return dq, dk, dv, drel, dproj, dsink


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _far(S: int, window: int | None, chunks: int, T: int) -> bool:
    """Whether some tile is seen and lies beyond the bias."""
    return cdiv(S, T) + 1 > chunks and cdiv((window or S) - 1, T) > chunks - 2


def _padded(R: int) -> int:
    """Tensor cores multiply at least 16."""
    return max(16, triton.next_power_of_2(R))


def _documents(documents: Documents | None, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers; without documents no kernel reads them."""
    if documents is None:
        return other, other, other
    return documents.segments, documents.first, documents.last
