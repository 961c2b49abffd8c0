"""The one exception family that users see: a sentence that names the thing and the fix."""

from __future__ import annotations


class NybbleError(ValueError):
    """A problem that the user can mend; the command line prints its message alone and exits with status 1."""


class RecipeError(NybbleError):
    """A recipe that is malformed, or a rule of it that matches nothing."""


class DataError(NybbleError):
    """A corpus, shard or tokeniser that is missing, corrupt or does not fit the model."""


class CheckpointError(NybbleError):
    """A checkpoint that is missing, corrupt, incomplete or does not fit the model."""


class NonFiniteError(NybbleError):
    """A NaN or an infinity met in training; the message names the layer and the step."""


class ConfigError(NybbleError):
    """A setting that is unknown or out of range; the message names the field and the fix."""


class StoppedError(NybbleError):
    """A signal ended the work before its end; the command line exits with `status`, 128 + signal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[StoppedError], tuple[str, int]]:
        return StoppedError, (str(self), self.status)


class EngineError(NybbleError):
    """A server that samples is dead, refuses, or answers what cannot be used; the message names it."""


class ExchangeError(NybbleError):
    """An exchange between ranks failed, because another rank is gone or late."""
