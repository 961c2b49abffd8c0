"""Quantised layers, and `convert`, which puts them into a model."""

from nybble.layers.convert import Report, convert
from nybble.layers.experts import Experts
from nybble.layers.linear import Linear
from nybble.layers.refresh import refresh
from nybble.layers.step import StepState, set_step

__all__ = ["Experts", "Linear", "Report", "StepState", "convert", "refresh", "set_step"]
