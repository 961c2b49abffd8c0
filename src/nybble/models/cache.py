"""What generation keeps of the past: keys, values, inputs of short convolutions and recurrent states."""

import torch
from torch import Tensor


class _Growing:
    """[B, n, heads, D] that grows along n, doubling its storage, so that appending is cheap."""

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.data: Tensor | None = None
        self.n = 0

    def append(self, new: Tensor) -> Tensor:
        """All kept tokens followed by `new`; from then on only the last `keep` are kept, if set."""
        S = new.shape[1]
        if self.keep is not None:
            joined = new if self.data is None else torch.cat([self.data, new], dim=1)
            self.data = joined[:, max(joined.shape[1] - self.keep, 0) :].clone()
            return joined
        if self.data is None or self.n + S > self.data.shape[1]:
            size = max(64, 2 * self.n, self.n + S)
            grown = new.new_empty(new.shape[0], size, *new.shape[2:])
            if self.data is not None:
                grown[:, : self.n] = self.data[:, : self.n]
            self.data = grown
        self.data[:, self.n : self.n + S] = new
        self.n += S
        return self.data[:, : self.n]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch alone."""
        if self.data is not None:
            self.data = self.data.index_select(0, rows)


class Cache:
    """State of one batch of sequences under generation.

    Args:
        windows: for each layer its attention window in tokens, or None for full attention; a sliding layer
            keeps only the window - 1 tokens that later queries can reach.

    `length` counts the tokens seen; `segments` [B, length] or None tells documents (and left padding) apart.
    """

    def __init__(self, windows: list[int | None]) -> None:
        keeps = [None if window is None else window - 1 for window in windows]
        self.keys = [_Growing(keep) for keep in keeps]
        self.values = [_Growing(keep) for keep in keeps]
        self.convs: dict[tuple[int, int], Tensor] = {}
        self.states: dict[int, Tensor] = {}
        """Recurrent state of each layer that has one."""
        self.length = 0
        self.segments: Tensor | None = None

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values [B, S, heads, D]; returns all that these S queries may reach."""
        return self.keys[layer].append(key), self.values[layer].append(value)

    def swap_conv(self, layer: int, slot: int, x: Tensor, count: int) -> Tensor:
        """The `count` inputs before x [B, S, C], zeros before the first; keeps the last ones."""
        past = self.convs.get((layer, slot))
        if past is None:
            past = x.new_zeros(x.shape[0], count, x.shape[2])
        self.convs[layer, slot] = torch.cat([past, x], dim=1)[:, x.shape[1] :].clone()
        return past

    def select(self, rows: Tensor) -> None:
        """Keep these sequences [n] int64 of the batch alone, in this order."""
        for grown in (*self.keys, *self.values):
            grown.select(rows)
        self.convs = {place: past.index_select(0, rows) for place, past in self.convs.items()}
        self.states = {layer: state.index_select(0, rows) for layer, state in self.states.items()}
        if self.segments is not None:
            self.segments = self.segments.index_select(0, rows)

    def advance(self, tokens: int, segments: Tensor | None) -> None:
        """Note that `tokens` more tokens, of documents `segments` [B, tokens], went through all layers."""
        if segments is not None:
            old = [] if self.segments is None else [self.segments]
            self.segments = torch.cat([*old, segments], dim=1)
        self.length += tokens
