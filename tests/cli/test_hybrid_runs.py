"""The hybrid by the command line: training, exact resume, sampling and export."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from micro import make_data
from test_whole_runs import rows
from transformers import NemotronHForCausalLM

from nybble import quantize
from nybble.checkpoints import hf
from nybble.checkpoints.hub import load_model
from nybble.cli import main
from nybble.models import presets

MICRO = presets.Preset(
    name="hybrid-micro",
    description="for tests",
    model_type="nemotron_h",
    config={
        "vocab_size": 320,
        "hidden_size": 64,
        "hybrid_override_pattern": "M-M*-",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "mamba_num_heads": 32,
        "mamba_head_dim": 4,
        "n_groups": 2,
        "ssm_state_size": 32,
        "max_position_embeddings": 256,
    },
    sequence=16,
    batch=2,
    learning_rate=1e-2,
    steps=4,
)
FLAGS = ["--val-every", "2", "--val-batches", "1", "--save-every", "2", "--log-every", "1"]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(presets, "_PRESETS", (*presets._PRESETS, MICRO))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_hybrid_trains_resumes_samples_and_exports(tmp_path: Path) -> None:
    data, whole, part = make_data(tmp_path), tmp_path / "whole", tmp_path / "part"
    words = ["pretrain", "hybrid-micro", "--data", str(data), "--recipe", "mxfp8", "--mask-documents", *FLAGS]
    assert main([*words, "--out", str(whole)]) == 0
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step_00000004")
    assert main(["pretrain", "hybrid-micro", "--out", str(part), "--resume"]) == 0
    assert rows(part) == rows(whole)
    assert main(["sample", str(whole), "--max-new-tokens", "5", "--temperature", "0"]) == 0
    trained = load_model(whole)
    checkpoint = sorted((whole / "checkpoints").glob("step*"))[-1] / "model"
    theirs = NemotronHForCausalLM.from_pretrained(checkpoint)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    # served weights are those of the forward pass, bit for bit
    out = tmp_path / "exported"
    assert main(["export", str(whole), "--out", str(out), "--linears", "recipe", "--rest", "keep"]) == 0
    assert main(["validate", str(out)]) == 0
    hf.register()
    served = NemotronHForCausalLM.from_pretrained(out)
    q = quantize(trained.model.model.layers[1].mixer.up_proj.weight.detach(), "mxfp8")
    assert torch.equal(served.model.layers[1].mixer.up_proj.weight, q.dequantize(torch.float32))
    for name in ("mixer.A_log", "mixer.conv1d.weight", "norm.weight"):
        got, expected = (m.model.layers[0].get_parameter(name) for m in (served, trained.model))
        assert torch.equal(got, expected), name


def test_inkling_wants_experts_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "hybrid-tiny", "--recipe", "inkling"]) != 0
    assert "the model has none; for a dense model choose mxfp8" in capsys.readouterr().err
    assert main(["inspect", "hybrid-tiny", "--recipe", "mxfp8"]) == 0
    assert "mixer.in_proj" in capsys.readouterr().out
