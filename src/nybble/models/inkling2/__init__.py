"""The text part of Inkling 2."""

from nybble.models.inkling2.model import Inkling2ForCausalLM

__all__ = ["Inkling2ForCausalLM"]
