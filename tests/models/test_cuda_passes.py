"""The passes of models on GPUs, without a GPU under Triton's interpreter, are their plain formulas."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nybble.models import cuda

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
CHECKS = [
    "norms_of_rows",
    "mixtures",
    "finished_blocks",
    "convolutions",
    "dynamic_convolutions",
    "gates",
    "losses",
    "routes",
    "whole_model",
    "sharded_model",
]


def test_interpreted_passes_equal_the_formulas():
    script = Path(__file__).with_name("cuda_pass_cases.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script.parents[1] / "watched.py"), str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_plain_torch_can_be_chosen_after_the_import(monkeypatch):
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "_why_not", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("NYBBLE_PLAIN_PASSES", raising=False)
    assert cuda.on_gpu(x)
    monkeypatch.setenv("NYBBLE_PLAIN_PASSES", "1")
    assert not cuda.on_gpu(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_passes_equal_the_formulas_on_a_gpu(name):
    import cuda_pass_cases

    with torch.device("cuda"):
        cuda_pass_cases.run(getattr(cuda_pass_cases, name))
