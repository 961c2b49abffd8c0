"""The architectures that Nybble has its own classes for, by transformers' name of them."""

from dataclasses import dataclass

from transformers import Inkling2TextConfig, NemotronHConfig, PretrainedConfig

from nybble.errors import NybbleError
from nybble.models.causal_lm import CausalLM
from nybble.models.inkling2 import Inkling2ForCausalLM
from nybble.models.nemotron_h import NemotronHForCausalLM


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture."""

    config_class: type[PretrainedConfig]
    model_class: type[CausalLM]
    vocabulary: tuple[str, ...]
    """Config fields that hold the size of the vocabulary."""


FAMILIES = {
    "inkling2_text": Family(
        config_class=Inkling2TextConfig,
        model_class=Inkling2ForCausalLM,
        vocabulary=("vocab_size", "unpadded_vocab_size"),
    ),
    "nemotron_h": Family(
        config_class=NemotronHConfig, model_class=NemotronHForCausalLM, vocabulary=("vocab_size",)
    ),
}


def family(model_type: str) -> Family:
    """The family of a config's `model_type`; NybbleError lists the known ones if there is none."""
    if model_type not in FAMILIES:
        raise NybbleError(f"model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
