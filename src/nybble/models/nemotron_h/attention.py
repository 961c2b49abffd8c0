"""Causal attention with grouped keys and no position encoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import NemotronHConfig

from nybble.models.context import Context
from nybble.models.flex import flex
from nybble.models.linear import Linear


class Attention(nn.Module):
    """[B, S, H] -> [B, S, H]; tokens see what came before them in their document."""

    def __init__(self, config: NemotronHConfig, layer: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.size = layer, size
        self.q_proj = Linear(hidden, heads * size)
        self.k_proj = Linear(hidden, key_heads * size)
        self.v_proj = Linear(hidden, key_heads * size)
        self.o_proj = Linear(heads * size, hidden)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if context.block_masks and context.segments is not None:
            out = flex(q, k, v, context.block_masks[None], self.size**-0.5)
        else:
            mask = _mask(context, q.shape[2], k.shape[2], q.device)
            causal = mask is None and q.shape[2] > 1
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def _mask(context: Context, S: int, T: int, device: torch.device) -> Tensor | None:
    """Which of T keys each of the last S tokens sees, [B or 1, 1, S, T]; None for all up to itself."""
    if context.segments is None and (S == T or S == 1):
        return None
    seen = torch.ones(S, T, dtype=torch.bool, device=device).tril(T - S)[None, None]
    keys = context.key_segments(T)
    if keys is not None and context.segments is not None:
        seen = seen & (context.segments[:, None, :, None] == keys[:, None, None, :])
    return seen
