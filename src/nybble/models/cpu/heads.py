"""What attention reads and gives on a CPU: everything by channel, tokens along rows, FP32.

Legend: T = B * S tokens, H query heads, h key heads, D head size, R weights of bias profiles, K taps.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nybble.models.cpu.band import Integers
from nybble.models.cpu.jit import Floats, floats


class Heads(NamedTuple):
    """What the projections gave, by channel, or gradients of it."""

    q: Floats
    """[H * D, T]"""
    gate: Floats
    """[H * D, T]"""
    rel: Floats
    """[H * R, T]"""
    sink: Floats
    """[H, T]"""
    k: Floats
    """[h * D, T]"""
    drive_k: Floats
    """[h * K, T], taps computed for each token; no rows where there are none."""
    v: Floats
    """[h * D, T]"""
    drive_v: Floats
    """[h * K, T]"""


class Weights(NamedTuple):
    """Small learned tensors, or gradients of them with a first axis for partial sums."""

    scale_q: Floats
    """[H, D]"""
    scale_rel: Floats
    """[H, R]"""
    proj: Floats
    """[extent, R], nearest distance first."""
    taps_k: Floats
    """[h * D, K], or [K, h * D] beside computed taps: see `channels.tap_of`."""
    taps_v: Floats


class Tokens(NamedTuple):
    """What is known of tokens."""

    document: Integers
    """[B, S], or [B, 0] where a sequence is one document."""
    same: Floats
    """[B, K - 1, S], 1 where the token that far back is of the same document; or no rows."""
    gain: Floats
    """[B, S] factors of queries and of their weights of the bias; or [B, 0]."""


class Numbers(NamedTuple):
    """Of one layer."""

    window: int
    scale: np.float32
    limit: np.float32
    """Largest norm of queries and keys."""
    rel_limit: np.float32
    eps: np.float32
    kernel: int


Group = TypeVar("Group", Heads, Weights)


def arrays(group: type[Group], tensors: Iterable[Tensor]) -> Group:
    """`group` of tensors as arrays; only contiguous ones can be filled."""
    return group(*(floats(x) for x in tensors))


def tokens(B: int, S: int, document: Tensor | None, same: tuple[Tensor, ...], gain: Tensor | None) -> Tokens:
    """`document` [B, S], `same` as in `Context`, `gain` broadcastable to [B, S, 1, 1]."""
    return Tokens(
        np.empty((B, 0), dtype=np.int64) if document is None else document.long().contiguous().numpy(),
        np.empty((B, 0, S), dtype=np.float32) if not same else floats(torch.stack(same, dim=1)[..., 0]),
        np.empty((B, 0), dtype=np.float32) if gain is None else floats(gain.expand(B, S, 1, 1)[..., 0, 0]),
    )
