"""Small configurations in which every part of the model matters, and weights of which none is zero."""

from typing import Any

import torch
from torch import nn
from transformers import NemotronHConfig

from nybble.models import NemotronHForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "hybrid_override_pattern": "M-M*E-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}

CASES: dict[str, dict[str, Any]] = {
    "all kinds of layers": {},
    "as dense models have it": {"hybrid_override_pattern": "M-M-M*-M-"},
    "one group of heads": {"n_groups": 1, "ssm_state_size": 12},
    "a group a head, wide heads": {"n_groups": 4, "mamba_num_heads": 4, "mamba_head_dim": 24},
    "chunks longer than the sequence": {"chunk_size": 256},
    "biases everywhere, none in the convolution": {
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
    },
    "steps at their bound, other kernel": {"time_step_min": 0.8, "conv_kernel": 3},
    "one key head": {"num_key_value_heads": 1, "head_dim": 16, "hybrid_override_pattern": "**M"},
    "grouped routing in a latent space": {
        "hybrid_override_pattern": "EME",
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "moe_latent_size": 16,
        "routed_scaling_factor": 2.5,
    },
    "weights of experts as they are": {"hybrid_override_pattern": "ME", "norm_topk_prob": False},
}


def small_config(**changes: Any) -> NemotronHConfig:
    return NemotronHConfig(**{**SMALL, **changes})


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every parameter and saved buffer random values, those that start at zero or one too."""
    for name, tensor in model.state_dict().items():
        if name.endswith("A_log"):
            tensor.copy_(torch.randn_like(tensor) - 0.5)  # decays from slow to fast
        elif tensor.dim() == 1:
            tensor.copy_(0.5 + 0.5 * torch.randn_like(tensor))
        else:
            tensor.copy_(0.3 * torch.randn_like(tensor))


def random_model(**changes: Any) -> NemotronHForCausalLM:
    model = NemotronHForCausalLM(small_config(**changes))
    randomise(model)
    return model.eval()


def random_ids(batch: int, length: int, vocabulary: int = 100) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))
