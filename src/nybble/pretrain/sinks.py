"""TensorBoard and Weights & Biases, imported only when a run asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from nybble.errors import ConfigError
from nybble.pretrain.config import LogConfig


class Sink(Protocol):
    """Takes the scalars of a step."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(config: LogConfig, run: Path, settings: dict[str, Any], first_step: int) -> list[Sink]:
    """The sinks that `config` asks for. Raises ConfigError naming the extra that a missing one needs."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(_TensorBoard(run, first_step))
    if config.wandb:
        sinks.append(_Wandb(config.wandb, run, settings))
    return sinks


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row that make a curve."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}


class _TensorBoard:
    def __init__(self, run: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--tensorboard needs the extra: pip install 'nybble[tensorboard]'") from None
        # purge_step hides what a killed run logged beyond the checkpoint from which this one goes on.
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, run: Path, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("--wandb needs the extra: pip install 'nybble[wandb]'") from None
        self._run = wandb.init(project=project, name=run.name, dir=str(run), config=settings)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()
