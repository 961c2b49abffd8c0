"""TensorBoard and Weights & Biases, imported only when a run asks for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from nybble.errors import ConfigError
from nybble.pretrain.config import LogConfig


class Sink(Protocol):
    """Takes the scalars of a step."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(config: LogConfig) -> None:
    """Raise ConfigError naming the extra that a sink needs which `config` asks for and which is missing."""
    for name, wanted in (("tensorboard", config.tensorboard), ("wandb", bool(config.wandb))):
        if wanted and find_spec(name) is None:
            raise ConfigError(f"--{name} needs the extra: pip install 'nybble[{name}]'")


def open_sinks(config: LogConfig, run: Path, settings: dict[str, Any], first_step: int) -> list[Sink]:
    """The sinks that `config` asks for, which `check_sinks` has found."""
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
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a killed run logged beyond the checkpoint from which this one goes on.
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, run: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, name=run.name, dir=str(run), config=settings)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()
