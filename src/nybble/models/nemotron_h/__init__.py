"""Nemotron-H: Mamba-2, attention and squared-ReLU layers by a pattern."""

from nybble.models.nemotron_h.model import NemotronHForCausalLM

__all__ = ["NemotronHForCausalLM"]
