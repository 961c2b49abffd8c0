"""Inkling 2, text part, with the parameter names, shapes and folders of transformers' class.

Facts: transformers 5.24, `models/inkling2`. Written for training: see `attend.py`, `experts.py`, `loss.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.models.cache import Cache
from nybble.models.causal_lm import CausalLM, Stack
from nybble.models.context import Context, document_positions
from nybble.models.inkling2.config import check, windows
from nybble.models.inkling2.fused import why_not_fused
from nybble.models.inkling2.layer import DecoderLayer, make_layer
from nybble.models.inkling2.pretrained import Inkling2PreTrainedModel
from nybble.models.inkling2.residual import Block, BlockAttentionResidual
from nybble.models.norms import RMSNorm


class NormedEmbedding(nn.Embedding):
    """Token embedding followed by an RMS norm: ids [B, S] -> [B, S, H]."""

    def __init__(self, rows: int, hidden: int, padding: int | None, eps: float) -> None:
        super().__init__(rows, hidden, padding)
        self.embed_norm = RMSNorm(hidden, eps)

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """In `dtype`, the weight's by default."""
        normed: Tensor = self.embed_norm(super().forward(ids), dtype)
        return normed


class Inkling2TextModel(Stack, Inkling2PreTrainedModel):
    """Embedding, decoder layers and final norm.

    forward(ids [B, S], context) -> hidden [B, S, H], tokens per expert [layers, E] int64.
    """

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = NormedEmbedding(config.vocab_size, hidden, config.pad_token_id, eps)
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.final_input = BlockAttentionResidual(hidden)
        self.post_init()

    def forward(self, input_ids: Tensor, context: Context, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        hidden = self.embed_tokens(input_ids, dtype)
        blocks: tuple[Block, ...] = ()
        counts = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            hidden, blocks, count = self.run(i, layer, hidden, blocks, context)
            counts.append(count)
        (final,), _, _ = self.final_input(blocks, hidden, (self.norm,), (1,), dtype)
        return final, torch.stack(counts)


class Inkling2ForCausalLM(CausalLM, Inkling2PreTrainedModel):
    """A causal language model of the Inkling 2 shape; `config` is transformers' `Inkling2TextConfig`.

    Its head is padded with zeros in folders, as the config's `vocab_size` says.
    """

    knows_batch_invariance = True

    def __init__(self, config: Inkling2TextConfig) -> None:
        check(config)
        super().__init__(config)
        self.model = Inkling2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.unpadded_vocab_size, bias=False)
        load = torch.zeros(config.num_hidden_layers, config.n_routed_experts, dtype=torch.int64)
        self.register_buffer("expert_load", load, persistent=False)
        self.post_init()

    @property
    def cap(self) -> float:
        return float(self.config.final_logit_softcapping)

    @property
    def kernel(self) -> int:
        return int(self.config.conv_kernel_size)

    def windows(self) -> list[int | None]:
        return windows(self.config)

    def why_not_fused(self, device: torch.device) -> str | None:
        config = self.config
        kinds = {"hybrid": (config.head_dim,), "hybrid_sliding": (config.swa_head_dim,)}
        sizes = tuple(sorted({size for kind in config.layer_types for size in kinds[kind]}))
        return why_not_fused(device, self._dtype(), sizes, config.d_rel)

    def routers(self) -> Iterator[nn.Module]:
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.mlp.gate

    def _context(
        self, ids: Tensor, segments: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> Context:
        past = 0 if cache is None else cache.length
        if (
            segments is not None
            and positions is None
            and past + ids.shape[1] > self.config.log_scaling_n_floor
        ):
            positions = document_positions(segments, None if cache is None else cache.segments)
        return super()._context(ids, segments, positions, cache)
