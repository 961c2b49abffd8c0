"""Documents packed in a row of tokens, as attention kernels want them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """int32 [B, S] each: the document of a token, and the first and last token of that document."""

    segments: Tensor
    first: Tensor
    last: Tensor


def find_documents(segments: Tensor) -> Documents:
    """For `segments` [B, S] int; tokens of one value are one document, wherever in the row they are."""
    S = segments.shape[1]
    ordered, order = segments.sort(dim=1, stable=True)
    place = torch.arange(S, device=segments.device).expand_as(order)
    change = ordered[:, 1:] != ordered[:, :-1]
    begins, ends = torch.zeros_like(order), torch.full_like(order, S - 1)
    begins[:, 1:] = torch.where(change, place[:, 1:], 0)
    ends[:, :-1] = torch.where(change, place[:, :-1], S - 1)
    begins = begins.cummax(dim=1).values
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    first, last = (torch.zeros_like(order).scatter(1, order, order.gather(1, at)) for at in (begins, ends))
    return Documents(segments.int().contiguous(), first.int(), last.int())
