"""Settings that suit a preset: what `nybble pretrain PRESET` does when nothing else is said."""

from __future__ import annotations

from nybble.errors import ConfigError
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import merge


def preset_defaults(preset: str) -> PretrainConfig:
    """The settings that come with a preset.

    Raises ConfigError if no preset is named, and NybbleError if there is none of that name.
    """
    from nybble.models import presets

    if not preset:
        raise ConfigError(f"preset: name the model to train: {', '.join(presets.names())}")
    found = presets.get(preset)
    steps = found.steps
    values = {
        "batch": {"batch": found.batch, "sequence": found.sequence},
        "optimiser": {"lr": found.learning_rate},
        "schedule": {"steps": steps, "warmup": steps // 20},
        "validation": {"val_every": max(1, steps // 8)},
        "checkpoint": {"save_every": max(1, steps // 4)},
        "log": {"log_every": 10},
    }
    return merge(PretrainConfig(preset=preset), values, source=f"preset {preset}")
