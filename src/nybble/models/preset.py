"""One size of one architecture, with training settings that suit it."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from nybble.errors import NybbleError
from nybble.models.causal_lm import CausalLM
from nybble.models.families import family


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of one architecture."""

    name: str
    description: str
    model_type: str = "inkling2_text"
    """Architecture, by transformers' name."""
    config: dict[str, Any]
    """Fields of its config class that differ from their defaults."""
    sequence: int
    """Training sequence length, tokens."""
    batch: int
    """Sequences a step."""
    learning_rate: float
    """Peak of AdamW's schedule."""
    steps: int
    """Optimiser steps of a short run that shows learning."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the model can be asked to predict."""
        return int(getattr(self.model_config(), family(self.model_type).vocabulary[-1]))

    def model_config(self, vocabulary: int | None = None, **changes: Any) -> PretrainedConfig:
        """The configuration, with another vocabulary and fields changed.

        NybbleError for values that transformers refuses.
        """
        fields = family(self.model_type).vocabulary
        sizes = {} if vocabulary is None else dict.fromkeys(fields, vocabulary)
        try:
            return family(self.model_type).config_class(**{**self.config, **sizes, **changes})
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise NybbleError(f"model config: {error.__cause__ or error}") from error
        except KeyError as error:  # what transformers makes of an unknown letter
            raise NybbleError(
                f"model config: hybrid_override_pattern has a layer {error}; M is Mamba-2, * attention, "
                "- an MLP, E experts"
            ) from error

    def model(self, config: PretrainedConfig | None = None) -> CausalLM:
        """The model of `config`, or of the preset's own, with random weights.

        NybbleError where they are more than the machine's memory.
        """
        config = self.model_config() if config is None else config
        if torch.get_default_device().type == "cpu":
            self._check_room(config)
        return family(self.model_type).model_class(config)

    def meta_model(self, config: PretrainedConfig | None = None) -> CausalLM:
        """The model without memory, to count and to look at."""
        with torch.device("meta"):
            return self.model(config)

    def _check_room(self, config: PretrainedConfig) -> None:
        """Systems hand out more memory than there is, and end a process that fills it."""
        weights = sum(p.numel() for p in self.meta_model(config).parameters())
        size, room = weights * torch.get_default_dtype().itemsize, memory_bytes()
        if size > room > 0:
            raise NybbleError(
                f"the model {self.name} has {weights / 1e9:.1f} billion weights, {size / 2**30:.0f} GiB; "
                f"this machine has {room / 2**30:.0f} GiB of memory: choose a smaller model or vocabulary"
            )


def memory_bytes() -> int:
    """Memory of this machine; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
