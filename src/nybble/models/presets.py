"""Sizes of models with training settings that suit them."""

from typing import Any

from nybble.errors import NybbleError
from nybble.models.preset import Preset

_HYBRID_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 0}


def _vocabulary(size: int) -> dict[str, Any]:
    """A vocabulary without padding rows; the end-of-text token is the first."""
    return {"vocab_size": size, "unpadded_vocab_size": size, "eos_token_id": 0}


_PRESETS = (
    Preset(
        name="nano",
        description="reinforcement learning on a CPU: short texts of bytes, a hundred steps in minutes",
        config={
            **_vocabulary(4096),
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 32,
            "d_rel": 8,
            "rel_extent": 64,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "route_scale": 2.0,
            "max_position_embeddings": 1024,
        },
        sequence=128,
        batch=16,
        learning_rate=3e-3,
        steps=300,
    ),
    Preset(
        name="tiny",
        description="the demo: a few hundred steps in minutes on two CPU cores",
        config={
            **_vocabulary(4096),
            "hidden_size": 192,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 64,
            "d_rel": 16,
            "rel_extent": 128,
            "moe_intermediate_size": 192,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "route_scale": 2.0,
            "max_position_embeddings": 4096,
        },
        sequence=256,
        batch=4,
        learning_rate=3e-3,
        steps=260,
    ),
    Preset(
        name="mini",
        description="between tiny and small, so that a fit over sizes has three",
        config={
            **_vocabulary(16384),
            "hidden_size": 320,
            "num_hidden_layers": 12,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "swa_num_attention_heads": 5,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 64,
            "sliding_window_size": 128,
            "rel_extent": 512,
            "moe_intermediate_size": 256,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "route_scale": 4.0,
            "max_position_embeddings": 8192,
        },
        sequence=512,
        batch=32,
        learning_rate=2e-3,
        steps=2000,
    ),
    Preset(
        name="small",
        description="about 310 M parameters, 64 M of them in a token's products: one GPU",
        config={
            **_vocabulary(32768),
            "hidden_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 64,
            "sliding_window_size": 256,
            "rel_extent": 1024,
            "moe_intermediate_size": 448,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "route_scale": 4.0,
            "max_position_embeddings": 32768,
        },
        sequence=1024,
        batch=64,
        learning_rate=2e-3,
        steps=5000,
    ),
    Preset(
        name="inkling-2-small",
        description="the real shape, 594 B parameters: planning and checks without memory",
        config={},
        sequence=8192,
        batch=1024,
        learning_rate=3e-4,
        steps=100_000,
    ),
    Preset(
        name="hybrid-tiny",
        description="Mamba-2, attention and squared-ReLU layers, the demo's size: two CPU cores",
        model_type="nemotron_h",
        config={
            **_HYBRID_TOKENS,
            "vocab_size": 4096,
            "hidden_size": 192,
            "hybrid_override_pattern": "M-M-M*-M-M-M*-",
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 768,
            # 32 heads, so that the input projection has whole blocks of every format
            "mamba_num_heads": 32,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 128,
            "max_position_embeddings": 4096,
        },
        sequence=256,
        batch=4,
        learning_rate=3e-3,
        steps=260,
    ),
    Preset(
        name="hybrid-small",
        description="the hybrid at 86 M parameters: one GPU",
        model_type="nemotron_h",
        config={
            **_HYBRID_TOKENS,
            "vocab_size": 32768,
            "hidden_size": 512,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M-",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 2048,
            "mamba_num_heads": 32,
            "mamba_head_dim": 32,
            "n_groups": 4,
            "ssm_state_size": 128,
            "max_position_embeddings": 32768,
        },
        sequence=1024,
        batch=64,
        learning_rate=1e-3,
        steps=5000,
    ),
    Preset(
        name="nemotron-nano-12b-v2",
        description="the real shape of NVIDIA's 12B hybrid: planning and checks without memory",
        model_type="nemotron_h",
        config={
            "vocab_size": 131072,
            "hidden_size": 5120,
            "hybrid_override_pattern": "M-M-M-M*-" * 6 + "M-M-M-M-",
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 20480,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "n_groups": 8,
            "ssm_state_size": 128,
            "max_position_embeddings": 131072,
        },
        sequence=8192,
        batch=736,
        learning_rate=4.5e-4,
        steps=1_660_000,
    ),
)


def names() -> list[str]:
    """Names of all presets, by architecture, smallest first."""
    return [preset.name for preset in _PRESETS]


def get(name: str) -> Preset:
    """The preset of that name; NybbleError lists the names if there is none."""
    for preset in _PRESETS:
        if preset.name == name:
            return preset
    raise NybbleError(f"unknown preset {name!r}; the presets are {', '.join(names())}")
