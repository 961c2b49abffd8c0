"""Which tokens go to which rank, and where their results lie when they come back.

Legend: T tokens here, k experts a token, E experts of all ranks, P ranks, S rows sent, N rows received.
A token is sent once to each rank that holds experts of it, not once an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Wanted:
    """Which ranks each token needs; known before sizes are exchanged."""

    owner: Tensor
    """int64 [T, k]: the rank of each expert."""
    needed: Tensor
    """bool [P, T]."""
    counts: Tensor
    """int64 [P]: rows for each rank."""


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows of a layer's traffic, in the order in which they are sent: by rank, then by token."""

    token: Tensor
    """int64 [S]: token of each row."""
    places: Tensor
    """int32 [T, m]: the rows of each token, -1 where there are fewer than m."""
    experts: Tensor
    """int64 [S, k]: each choice as an index among the receiver's experts; their number where it is none."""
    first: Tensor
    """int64 [S]: the first choice that is the receiver's. It names the row in random draws."""
    sent: list[int]
    """Rows sent to each rank; sums to S."""
    received: list[int]
    """Rows that come from each rank; sums to N."""

    @property
    def arriving(self) -> int:
        """N."""
        return sum(self.received)


def wanted(index: Tensor, ranks: int, experts_each: int) -> Wanted:
    """`index` int64 [T, k] counts the experts of all ranks; each rank has `experts_each` of them."""
    owner = index // experts_each
    every = torch.arange(ranks, device=index.device)
    needed = (owner.unsqueeze(0) == every[:, None, None]).any(-1)
    return Wanted(owner, needed, needed.sum(-1))


def routes(index: Tensor, want: Wanted, experts_each: int, sent: list[int], received: list[int]) -> Routes:
    """The routes once sizes are known on the host; nothing here waits for a GPU."""
    ranks, tokens = want.needed.shape
    k = index.shape[1]
    flat = want.needed.reshape(-1)
    # Rows in order of rank and token: a stable sort brings the needed pairs to the front.
    pair = torch.sort(flat.to(torch.int8), descending=True, stable=True).indices[: sum(sent)]
    token = pair % max(tokens, 1)
    rank = pair // max(tokens, 1)
    row = (torch.cumsum(flat, 0) - 1).view(ranks, tokens).t()  # [T, P]
    m = min(k, ranks)
    order = torch.sort(want.needed.t().to(torch.int8), dim=1, descending=True, stable=True).indices[:, :m]
    places = torch.where(want.needed.t().gather(1, order), row.gather(1, order), -1).to(torch.int32)
    here = want.owner[token] == rank.unsqueeze(-1)  # [S, k]
    experts = torch.where(here, index[token] - rank.unsqueeze(-1) * experts_each, experts_each)
    return Routes(
        token=token,
        places=places,
        experts=experts,
        first=here.to(torch.int8).argmax(-1),
        sent=sent,
        received=received,
    )
