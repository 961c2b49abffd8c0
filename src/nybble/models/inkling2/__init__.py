"""The text part of Inkling 2."""

from nybble.models.inkling2.model import CausalLMOutput, Inkling2ForCausalLM

__all__ = ["CausalLMOutput", "Inkling2ForCausalLM"]
