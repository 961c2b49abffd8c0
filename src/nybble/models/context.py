"""What the layers of one forward pass share: positions, documents, generation cache and masks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nybble.models.cache import Cache
from nybble.models.documents import Documents


@dataclass
class Context:
    """Everything but the hidden states.

    `positions` [B, S] or None for 0..S-1 after the cache; `segments` [B, S] int, tokens with different
    values in one row belong to different documents and never see each other, None for one document a row;
    `past` tokens are already in `cache`; `past_segments` [B, past] go with `segments`; `same` holds for each
    lag 1..kernel-1 an FP32 [B, S, 1] that is 1 where the token that far back is of the same document, or
    nothing; `starts` [B, S] says where each token's document starts, counted from the first of these tokens
    and so negative for one that began in the cache; `block_masks` holds FlexAttention's masks by window;
    `fused` says that attention without a past goes through the model's own kernels, `documents` tells them
    the segments.
    """

    positions: Tensor | None = None
    segments: Tensor | None = None
    past: int = 0
    cache: Cache | None = None
    past_segments: Tensor | None = None
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    same: tuple[Tensor, ...] = ()
    starts: Tensor | None = None
    fused: bool = False
    documents: Documents | None = None

    def conv_state(self, x: Tensor, layer: int, slot: int, kernel: int) -> Tensor | None:
        """The kernel-1 inputs [B, kernel-1, C] before x, after noting those of x; None without a cache."""
        if self.cache is None:
            return None
        return self.cache.swap_conv(layer, slot, x, kernel - 1)

    def key_segments(self, keys: int) -> Tensor | None:
        """Documents [B, keys] of the last `keys` tokens, the new ones included."""
        if self.segments is None or self.past_segments is None:
            return self.segments
        return torch.cat([self.past_segments, self.segments], dim=1)[:, -keys:]

    def length_gain(self, S: int, floor: int, alpha: float, device: torch.device) -> Tensor | None:
        """1 + alpha * log(max((position + 1) / floor, 1)), [B or 1, S, 1, 1]; None if 1 everywhere."""
        positions = self.positions
        if positions is None:
            if self.past + S <= floor:
                return None
            positions = torch.arange(self.past, self.past + S, device=device)[None]
        reach = ((positions + 1).float() / floor).clamp(min=1.0)
        return (1.0 + alpha * reach.log())[..., None, None]


def same_document(segments: Tensor, past: Tensor | None, kernel: int) -> tuple[Tensor, ...]:
    """The field `same` of `Context` from `segments` [B, S] and those of the tokens before, `past` [B, P]."""
    B, S = segments.shape
    line = segments if past is None else torch.cat([past, segments], dim=1)
    # what lies before the first token is zeros, so its document does not matter
    line = torch.cat([line[:, :1].expand(B, kernel - 1), line], dim=1)
    end = line.shape[1]
    return tuple(
        (line[:, end - S - lag : end - lag] == segments).unsqueeze(-1).float() for lag in range(1, kernel)
    )


def document_positions(segments: Tensor, past: Tensor | None) -> Tensor:
    """Position of each token [B, S] within its document, from the documents of all tokens so far."""
    line = segments if past is None else torch.cat([past, segments], dim=1)
    index = torch.arange(line.shape[1], device=line.device).expand_as(line)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(line[:, 1:] != line[:, :-1], index[:, 1:], 0)
    return (index - starts.cummax(dim=1).values)[:, line.shape[1] - segments.shape[1] :]


def document_starts(segments: Tensor, past: Tensor | None) -> Tensor:
    """The field `starts` of `Context`; arguments as for `document_positions`."""
    return torch.arange(segments.shape[1], device=segments.device) - document_positions(segments, past)
