"""Fixtures of the tests of export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_folders import LAYERS, E, relayout, save, weights


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """`make(layout, model_type, **sizes)` writes a folder and returns it."""

    def make(layout: str = "separate", model_type: str = "qwen3_moe", name: str = "model", **sizes) -> Path:
        tensors = relayout(weights(**sizes), layout)
        if model_type.startswith("inkling2"):
            tensors = {n.replace("model.", "model.llm.", 1): t for n, t in tensors.items()}
        config = {
            "model_type": model_type,
            "num_experts": sizes.get("experts", E),
            "num_hidden_layers": sizes.get("layers", LAYERS),
            "dtype": "float32",
        }
        return save(tmp_path / name, tensors, config)

    return make
