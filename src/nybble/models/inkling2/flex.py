"""The attention of `attend.py` through FlexAttention."""

from typing import Any

import torch
from torch import Tensor

from nybble.models.flex import flex


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, proj: Tensor, sink: Tensor, *, scale: float, mask: Any
) -> Tensor:
    """The formula of `attend.py` through FlexAttention, for S = T; `mask` is a `block_mask`."""
    from torch.nn.attention.flex_attention import AuxRequest

    extent = proj.shape[1]
    bias = (rel @ proj.to(rel.dtype)).transpose(1, 2).contiguous()  # [B, H, S, extent]

    def add_bias(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i - j
        near = (distance >= 0) & (distance < extent)
        return score + torch.where(near, bias[b, head, i, distance.clamp(0, extent - 1)], 0.0)

    out, aux = flex(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        scale,
        score_mod=add_bias,
        return_aux=AuxRequest(lse=True),
    )
    keep = torch.sigmoid(
        aux.lse - sink.float().transpose(1, 2)
    )  # the sink's value is zero: it only takes mass away
    return (out * keep[..., None].to(out.dtype)).transpose(1, 2)
