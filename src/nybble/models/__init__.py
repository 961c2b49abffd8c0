"""Few, fast, readable decoders, weight-compatible with transformers."""

from nybble.models.causal_lm import CausalLM, CausalLMOutput
from nybble.models.inkling2 import Inkling2ForCausalLM
from nybble.models.nemotron_h import NemotronHForCausalLM

__all__ = ["CausalLM", "CausalLMOutput", "Inkling2ForCausalLM", "NemotronHForCausalLM"]
