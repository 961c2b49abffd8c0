"""Few, fast, readable decoders, weight-compatible with transformers."""

from nybble.models.inkling2 import CausalLMOutput, Inkling2ForCausalLM

__all__ = ["CausalLMOutput", "Inkling2ForCausalLM"]
