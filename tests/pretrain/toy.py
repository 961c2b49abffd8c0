"""A model, data and session small enough to train in milliseconds, with the interface of the real ones."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nybble.pretrain.config import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    OptimiserConfig,
    PretrainConfig,
    ScheduleConfig,
    ValidationConfig,
)
from nybble.pretrain.runfolder import RunFolder
from nybble.pretrain.session import Session

VOCABULARY = 17


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ToyModel(nn.Module):
    """Embedding, two blocks, head, always the same weights; noise that a resume must restore."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.noise = noise

    def forward(
        self, ids: Tensor, *, shift_labels: Tensor, segments: Tensor | None = None
    ) -> SimpleNamespace:
        del segments
        x = self.embed(ids)
        if self.training:
            x = x + self.noise * torch.randn(x.shape)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()))


class ToyData:
    """Counts upwards from a position that is all its state."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> dict[str, Tensor]:
        tokens = (torch.arange(2 * 5).reshape(2, 5) + self.position) % VOCABULARY
        self.position += 1
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def held_out() -> Iterator[dict[str, Tensor]]:
    data = ToyData()
    data.position = 1000
    for _ in range(2):
        yield next(data)


def toy_config(**changes: Any) -> PretrainConfig:
    values: dict[str, Any] = {
        "preset": "toy",
        "batch": BatchConfig(batch=2, sequence=4, accumulate=2),
        "schedule": ScheduleConfig(steps=6, warmup=2, decay=0.5),
        "optimiser": OptimiserConfig(lr=0.01),
        "validation": ValidationConfig(val_every=3, val_batches=2),
        "checkpoint": CheckpointConfig(save_every=2, keep=2),
        "log": LogConfig(log_every=1),
    }
    return PretrainConfig(**(values | changes))


def toy_session(
    folder: Path,
    model: nn.Module | None = None,
    *,
    resume: bool = False,
    identity: dict[str, Any] | None = None,
    **changes: Any,
) -> Session:
    torch.manual_seed(0)
    return Session(
        config=toy_config(**changes),
        run=RunFolder(folder, resume=resume),
        model=model or ToyModel(),
        train_data=ToyData(),
        held_out_data=held_out,
        identity=identity or {"model": "toy"},
    )
