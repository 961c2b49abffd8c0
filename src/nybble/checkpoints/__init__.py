"""Checkpoints: exact resume of a run, and folders that transformers loads."""

from nybble.checkpoints.store import Checkpoint, latest, prune, read, sweep, write

__all__ = ["Checkpoint", "latest", "prune", "read", "sweep", "write"]
