"""Decoder layers of Inkling 2."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.models.context import Context
from nybble.models.experts import count_rows
from nybble.models.inkling2.attention import Attention
from nybble.models.inkling2.conv import ShortConvolution
from nybble.models.inkling2.experts import Experts
from nybble.models.inkling2.residual import Block, BlockAttentionResidual, finished
from nybble.models.inkling2.router import Router
from nybble.models.norms import RMSNorm


class SparseMLP(nn.Module):
    """[B, S, H] through routed experts -> [B, S, H], and how many rows each expert got [E] int64."""

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__()
        self.experts = Experts(config)
        self.gate = Router(config)

    def forward(self, x: Tensor, routed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`routed` is what the router reads, if not x."""
        flat = x.reshape(-1, x.shape[-1])
        _, weights, experts = self.gate(flat if routed is None else routed.reshape(flat.shape))
        counts = count_rows(experts, self.experts.num_experts)
        return self.experts(flat, experts, weights).view(x.shape), counts


class DecoderLayer(nn.Module):
    """Attention and experts, each fed by a mixture over blocks and followed by a short convolution.

    `forward(hidden, blocks, context)` -> hidden [B, S, H], the finished blocks (one more than before if
    `is_block_boundary`), tokens per expert [E].
    """

    sliding: bool

    def __init__(self, config: Inkling2TextConfig, layer: int) -> None:
        super().__init__()
        hidden, kernel = config.hidden_size, config.conv_kernel_size
        self.is_block_boundary = layer % config.n_layers_per_attn_res_block == 0
        queries = 1 if self.sliding else 3
        self.attention_input = BlockAttentionResidual(hidden, queries) if layer > 0 else None
        self.mlp_input = BlockAttentionResidual(hidden)
        self.self_attn = Attention(config, layer)
        self.mlp = SparseMLP(config)
        for name in self.norm_names():
            setattr(self, name, RMSNorm(hidden, config.rms_norm_eps))
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_convolution = ShortConvolution(hidden, kernel, layer, slot=2)
        self.post_mlp_convolution = ShortConvolution(hidden, kernel, layer, slot=3)

    def norm_names(self) -> Sequence[str]:
        """Norms of the attention's inputs: one for all, or one each for queries, keys and values."""
        raise NotImplementedError

    def forward(
        self, hidden: Tensor, blocks: tuple[Block, ...], context: Context
    ) -> tuple[Tensor, tuple[Block, ...], Tensor]:
        dtype = hidden.dtype
        norms = tuple(getattr(self, name) for name in self.norm_names())
        if self.attention_input is None:
            inputs = tuple(
                y
                for norm, count in zip(norms, self.self_attn.readers, strict=True)
                for y in norm(hidden, dtype, count)
            )
        else:
            inputs, hidden, blocks = self.attention_input(
                blocks, hidden, norms, self.self_attn.readers, dtype
            )
        attended = self.self_attn(inputs, context)
        residual = None if self.is_block_boundary else hidden
        partial = self.post_attention_convolution(attended, context, residual, torch.float32)
        if self.is_block_boundary:
            blocks = (*blocks, finished(hidden))
        (x, routed), residual, blocks = self.mlp_input(
            blocks, partial, (self.post_attention_layernorm,), (2,), dtype, dtype
        )
        out, counts = self.mlp(x, routed)
        return self.post_mlp_convolution(out, context, residual, dtype), blocks, counts


class SlidingDecoderLayer(DecoderLayer):
    """A layer of sliding-window attention."""

    sliding = True

    def norm_names(self) -> Sequence[str]:
        return ("input_layernorm",)


class FullDecoderLayer(DecoderLayer):
    """A layer of full attention: queries, keys and values mix the blocks with queries of their own."""

    sliding = False

    def norm_names(self) -> Sequence[str]:
        return ("q_input_layernorm", "k_input_layernorm", "v_input_layernorm")


def make_layer(config: Inkling2TextConfig, layer: int) -> DecoderLayer:
    """The decoder layer that `config.layer_types` names."""
    kind = SlidingDecoderLayer if config.layer_types[layer] == "hybrid_sliding" else FullDecoderLayer
    return kind(config, layer)
