"""Reinforcement learning whose sampler and trainer share one quantiser."""
