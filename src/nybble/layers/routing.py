"""Tokens sorted by expert and brought back. No size depends on the data, and nothing waits for a GPU.

Legend: T tokens, k experts a token, E experts, R = T * k rows. A pair is token * k + choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nybble.kernels import fused


class Route(NamedTuple):
    """Which pair each row is."""

    order: Tensor
    """int32 [R]: pair at each row."""
    ends: Tensor
    """int32 [E]: where each expert's rows end; rows behind the last belong to no expert here."""
    k: int

    def pair(self) -> Tensor:
        """int64 [R], pair at each row."""
        return self.order.long()

    def token(self) -> Tensor:
        """int64 [R], token of each row."""
        return self.pair() // self.k

    def expert(self) -> Tensor:
        """int64 [R], expert of each row; rows of none count as the last's."""
        rows = torch.arange(self.order.shape[0], device=self.order.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, rows, right=True).clamp(max=self.ends.shape[0] - 1)

    def place(self) -> Tensor:
        """int64 [R], row of each pair."""
        rows = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.empty_like(rows).index_copy_(0, self.pair(), rows)

    def draw_rows(self, rows: Tensor | None) -> Tensor:
        """What each row counts as in random draws: its pair, so that draws follow a token wherever it is
        sorted to.

        `rows` [T] renumbers the tokens: a token's index in the whole batch when this is a part of it.
        """
        return self.pair() if rows is None else rows[self.token()] * self.k + self.pair() % self.k


def route(experts: Tensor, count: int) -> Route:
    """Sort the pairs of `experts` [T, k], indices into `count` experts, stably; larger indices go last."""
    order, ends = fused.sort_pairs(experts, count)
    return Route(order, ends, experts.shape[-1])


def combine(rows: Tensor, factor: Tensor | None, place: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Sum of the k rows of each token, times `factor` [R] or [], in FP32 and in the order of the choices: [T,
    H].

    Gathering and adding has one order of additions; scattering with atomic additions has none.
    """
    tokens = rows.shape[0] // k
    per_choice = place.view(tokens, k)
    out = rows.new_zeros(tokens, rows.shape[1], dtype=torch.float32)
    for choice in range(k):
        at = per_choice[:, choice]
        part = rows.index_select(0, at).float()
        if factor is None:
            out.add_(part)
        else:
            out.addcmul_(part, factor[at].unsqueeze(-1) if factor.dim() else factor)
    return out.to(dtype)
