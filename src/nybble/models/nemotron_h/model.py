"""Nemotron-H, a hybrid of Mamba-2, attention and squared-ReLU layers, with the parameter names, shapes and
folders of transformers' class.

Facts: transformers 5.24, `models/nemotron_h`; arXiv 2504.03624 and 2508.14444. Written for training: see
`scan.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig

from nybble.models.causal_lm import CausalLM, Stack
from nybble.models.context import Context
from nybble.models.nemotron_h import kernels
from nybble.models.nemotron_h.attention import Attention
from nybble.models.nemotron_h.config import check
from nybble.models.nemotron_h.mamba import Mamba2
from nybble.models.nemotron_h.mlp import MLP, MoE
from nybble.models.nemotron_h.pretrained import NemotronHPreTrainedModel
from nybble.models.norms import RMSNorm


class Block(nn.Module):
    """x + mixer(norm(x)); the mixer is what the config's pattern says.

    forward(hidden [B, S, H], context) -> hidden, and tokens per expert [E] of a layer of experts, else None.
    """

    def __init__(self, config: NemotronHConfig, layer: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = _mixer(config, layer)

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        x = self.norm(hidden)
        if isinstance(self.mixer, MoE):
            out, counts = self.mixer(x)
            return hidden + out, counts
        return hidden + (self.mixer(x) if isinstance(self.mixer, MLP) else self.mixer(x, context)), None


def _mixer(config: NemotronHConfig, layer: int) -> nn.Module:
    kind = config.layers_block_type[layer]
    if kind == "mlp":
        return MLP(config, config.intermediate_size)
    if kind == "moe":
        return MoE(config)
    return Mamba2(config, layer) if kind == "linear_attention" else Attention(config, layer)


class NemotronHModel(Stack, NemotronHPreTrainedModel):
    """Embedding, blocks and final norm.

    forward(ids [B, S], context, dtype) -> hidden [B, S, H], tokens per expert [layers of experts, E] int64.
    """

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()

    def forward(
        self, input_ids: Tensor, context: Context, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.embeddings(input_ids).to(dtype)
        counts = []
        for i, layer in enumerate(self.layers):
            hidden, count = self.run(i, layer, hidden, context)
            if count is not None:
                counts.append(count)
        return self.norm_f(hidden), torch.stack(counts) if counts else None


class NemotronHForCausalLM(CausalLM, NemotronHPreTrainedModel):
    """A causal language model of the Nemotron-H shape; `config` is transformers' `NemotronHConfig`."""

    def __init__(self, config: NemotronHConfig) -> None:
        check(config)
        super().__init__(config)
        self.model = NemotronHModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        routed = config.layers_block_type.count("moe")
        load = torch.zeros(routed, config.n_routed_experts, dtype=torch.int64)
        self.register_buffer("expert_load", load, persistent=False)
        self.post_init()

    @property
    def kernel(self) -> int:
        return int(self.config.conv_kernel)

    def windows(self) -> list[int | None]:
        return [None] * self.config.num_hidden_layers

    def routers(self) -> Iterator[nn.Module]:
        for layer in self.model.layers:
            assert isinstance(layer, Block)
            if isinstance(layer.mixer, MoE):
                yield layer.mixer.gate

    def status(self) -> str:
        device = self.lm_head.weight.device
        reason = kernels.cannot_run(device, self.kernel)
        if reason is None:
            return "Mamba-2 by the kernels of mamba_ssm and causal_conv1d (not yet run with this model)"
        return f"Mamba-2 by Nybble's own chunked scan, not by mamba_ssm and causal_conv1d: {reason}"
