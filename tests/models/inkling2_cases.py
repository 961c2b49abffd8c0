"""Small configurations in which every part of the model matters, and weights of which none is zero."""

from typing import Any

import torch
from torch import nn
from transformers import Inkling2TextConfig

from nybble.models import Inkling2ForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "unpadded_vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "n_layers_per_attn_res_block": 2,
    "log_scaling_n_floor": 8,
}

CASES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "all sliding": {"layer_types": ["hybrid_sliding"] * 3},
    "all full": {"layer_types": ["hybrid"] * 3},
    "window beyond the sequence": {"sliding_window_size": 200},
    "window of one": {"sliding_window_size": 1},
    "bias beyond the sequence": {"rel_extent": 128},
    "one key head, other sizes when sliding": {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "clips that bite": {"qk_l2_clip_threshold": 1.5, "rel_l2_clip_threshold": 0.7},
    "five layers in blocks of three": {
        "num_hidden_layers": 5,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 3,
    },
    "a block a layer": {"n_layers_per_attn_res_block": 1},
    "many experts, other kernel": {"n_routed_experts": 16, "num_experts_per_tok": 5, "conv_kernel_size": 3},
    "no log scaling": {"log_scaling_n_floor": 128000},
}


def small_config(**changes: Any) -> Inkling2TextConfig:
    return Inkling2TextConfig(**{**SMALL, **changes})


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every parameter and saved buffer random values, those that start at zero or one too."""
    for tensor in model.state_dict().values():
        if tensor.dim() == 1:
            tensor.copy_(0.5 + 0.5 * torch.randn_like(tensor))
        else:
            tensor.copy_(0.3 * torch.randn_like(tensor))


def random_model(**changes: Any) -> Inkling2ForCausalLM:
    model = Inkling2ForCausalLM(small_config(**changes))
    randomise(model)
    return model.eval()


def random_ids(batch: int, length: int, vocabulary: int = 100) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))
