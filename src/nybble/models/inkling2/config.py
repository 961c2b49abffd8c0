"""What of transformers' configuration this implementation supports."""

from transformers import Inkling2TextConfig

from nybble.errors import NybbleError


def check(config: Inkling2TextConfig) -> None:
    """Raise NybbleError, naming the field, for a configuration that cannot be built."""

    def need(ok: bool, field: str, fix: str) -> None:
        if not ok:
            raise NybbleError(f"model config: {field} = {getattr(config, field)!r} {fix}")

    layers, kinds = config.num_hidden_layers, {"hybrid", "hybrid_sliding"}
    need(len(config.layer_types) == layers, "layer_types", f"must name {layers} layers (num_hidden_layers)")
    need(set(config.layer_types) <= kinds, "layer_types", f"may only hold {sorted(kinds)}")
    need(config.scoring_func == "sigmoid", "scoring_func", "is not supported; use 'sigmoid'")
    need(config.attention_dropout == 0.0, "attention_dropout", "is not supported; use 0.0")
    need(
        1 <= config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        f"must lie between 1 and n_routed_experts = {config.n_routed_experts}",
    )
    need(
        1 <= config.unpadded_vocab_size <= config.vocab_size,
        "unpadded_vocab_size",
        f"must lie between 1 and vocab_size = {config.vocab_size}",
    )
    for heads, keys in (
        ("num_attention_heads", "num_key_value_heads"),
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ):
        need(
            getattr(config, heads) % getattr(config, keys) == 0,
            heads,
            f"must be a multiple of {keys} = {getattr(config, keys)}",
        )
    for field in (
        "sliding_window_size",
        "rel_extent",
        "conv_kernel_size",
        "n_layers_per_attn_res_block",
        "d_rel",
    ):
        need(getattr(config, field) >= 1, field, "must be at least 1")


def windows(config: Inkling2TextConfig) -> list[int | None]:
    """Attention window of each layer in tokens, None for full attention."""
    return [config.sliding_window_size if kind == "hybrid_sliding" else None for kind in config.layer_types]
