"""A preset and a dataset small enough to test whole runs; as a script it is `nybble` with that preset."""

import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    # transformers imports torchao where it is installed, and torchao complains of binaries that do not fit.
    sys.modules["torchao"] = None  # type: ignore[assignment]

from nybble.models import presets

MICRO = presets.Preset(
    name="micro",
    description="for tests",
    config={
        "vocab_size": 320,
        "unpadded_vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 32,
        "sliding_window_size": 8,
        "d_rel": 8,
        "rel_extent": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "route_scale": 2.0,
        "max_position_embeddings": 256,
    },
    sequence=16,
    batch=2,
    learning_rate=1e-2,
    steps=8,
)


def add_preset() -> None:
    if MICRO not in presets._PRESETS:
        presets._PRESETS = (*presets._PRESETS, MICRO)


def make_data(folder: Path) -> Path:
    """A prepared dataset of made-up English."""
    from nybble.data import PrepareConfig, prepare

    said = (
        "the state of the union",
        "is strong",
        "and we shall keep it so",
        "for all who work here",
        "today",
    )
    lines = [[said[(i * 3 + j * j) % len(said)] for j in range(12)] for i in range(60)]
    text = "\n".join(" ".join(line) for line in lines)
    source = folder / "source.txt"
    source.write_text(text, encoding="utf-8")
    return prepare(
        PrepareConfig(
            source=(str(source),), out=folder / "data", vocab_size=300, val_fraction=0.2, quiet=True
        )
    )


if __name__ == "__mp_main__":  # in a worker of a comparison
    add_preset()

if __name__ == "__main__":
    import torch

    from nybble.cli import main

    torch.set_num_threads(1)
    add_preset()
    sys.exit(main())
