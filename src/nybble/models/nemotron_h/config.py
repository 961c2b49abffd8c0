"""What of transformers' configuration this implementation supports."""

from transformers import NemotronHConfig

from nybble.errors import NybbleError


def check(config: NemotronHConfig) -> None:
    """Raise NybbleError, naming the field, for a configuration that cannot be built."""

    def need(ok: bool, field: str, fix: str) -> None:
        if not ok:
            raise NybbleError(f"model config: {field} = {getattr(config, field)!r} {fix}")

    kinds = {"linear_attention", "full_attention", "mlp", "moe"}
    need(bool(config.layers_block_type), "layers_block_type", "must name at least one layer")
    need(set(config.layers_block_type) <= kinds, "layers_block_type", f"may only hold {sorted(kinds)}")
    need(not config.tie_word_embeddings, "tie_word_embeddings", "is not supported; use False")
    need(config.mlp_hidden_act == "relu2", "mlp_hidden_act", "is not supported; use 'relu2'")
    need(config.mamba_hidden_act in ("silu", "swish"), "mamba_hidden_act", "is not supported; use 'silu'")
    need(config.attention_dropout == 0.0, "attention_dropout", "is not supported; use 0.0")
    need(config.conv_kernel >= 1, "conv_kernel", "must be at least 1")
    need(
        config.num_attention_heads % config.num_key_value_heads == 0,
        "num_attention_heads",
        f"must be a multiple of num_key_value_heads = {config.num_key_value_heads}",
    )
    need(
        config.mamba_num_heads % config.n_groups == 0,
        "mamba_num_heads",
        f"must be a multiple of n_groups = {config.n_groups}",
    )
    if "moe" in config.layers_block_type:
        experts, groups = config.n_routed_experts, config.n_group
        need(experts % groups == 0, "n_routed_experts", f"must be a multiple of n_group = {groups}")
        need(experts // groups >= 2, "n_group", f"leaves fewer than 2 of {experts} experts a group")
        need(1 <= config.topk_group <= groups, "topk_group", f"must lie between 1 and n_group = {groups}")
        limit = experts // groups * config.topk_group
        need(
            1 <= config.num_experts_per_tok <= limit,
            "num_experts_per_tok",
            f"must lie between 1 and {limit}, the experts of topk_group = {config.topk_group} groups",
        )
