"""Whole runs by the command line: exact resume after SIGKILL, quiet stderr, what a run leaves, sampling."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import add_preset, make_data
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Inkling2ForCausalLM

from nybble.cli import main
from nybble.data import Dataset
from nybble.layers import Experts
from nybble.models import presets
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.metrics import TIMING_FIELDS, read
from nybble.pretrain.start import build_model
from nybble.recipes import load_recipe

FLAGS = ["--val-every", "4", "--val-batches", "1", "--save-every", "2", "--log-every", "1"]


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    shipped = presets._PRESETS
    add_preset()
    yield
    presets._PRESETS = shipped
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, in this process."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["pretrain", "micro", "--data", str(data), "--out", str(out), *FLAGS]) == 0
    return out


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in read(run / "metrics.jsonl")]


def start(data: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("micro.py")
    words = [sys.executable, "-W", "error::UserWarning", str(script), "pretrain", "micro"]
    words += ["--data", str(data), "--out", str(out), *FLAGS, *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], condition: Any) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("moment", ["after a step", "while a checkpoint is written"])
def test_sigkill_and_resume_write_the_metrics_of_a_run_never_killed(
    data: Path, whole: Path, tmp_path: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the killed run keeps for its backward pass differs from the whole one's: that too leaves every
    bit alone.
    """
    out = tmp_path / "killed"
    early = moment == "after a step"
    process = start(data, out, "--keep-activations" if early else "--activation-checkpointing")
    metrics = out / "metrics.jsonl"
    if early:
        wait_for(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3)
    else:
        unfinished = out / "checkpoints" / ".unfinished-step_00000004"
        wait_for(process, lambda: unfinished.exists())
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(read(metrics)) < 8
    assert main(["pretrain", "micro", "--data", str(data), "--out", str(out), "--resume"]) == 0
    assert "resume  from" in capsys.readouterr().out
    assert rows(out) == rows(whole)


def test_sigterm_saves_and_ends_with_143_and_nothing_on_stderr(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    process = start(data, out, "--steps", "100000", "--save-every", "0")
    wait_for(process, lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: saving after this step" in stdout
    assert "go on with --resume" in stdout
    assert not [line for line in stderr.splitlines() if not line.startswith("compiling kernels")]
    saved = [p.name for p in (out / "checkpoints").iterdir()]
    assert saved == [f"step_{len(read(out / 'metrics.jsonl')):08d}"]
    # Warm-up aside the schedule is the same for any number of steps, and this run is still in it.
    assert rows(out)[0]["loss"] == rows(whole)[0]["loss"]


def test_keep_activations_reaches_the_experts(data: Path) -> None:
    for keep, flags in (("recompute", {}), ("activations", {"keep_activations": True})):
        config = PretrainConfig(preset="micro", data=data, **flags)
        model, _ = build_model(config, Dataset.open(data), load_recipe("inkling"), torch.device("meta"))
        assert {module.keep for module in model.modules() if isinstance(module, Experts)} == {keep}


def test_a_run_leaves_what_the_reader_needs(whole: Path) -> None:
    names = {p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()}
    assert {
        "config.toml",
        "env.json",
        "precision.txt",
        "recipe.toml",
        "metrics.jsonl",
        "plots/loss.png",
    } <= names
    assert json.loads((whole / "env.json").read_text())["versions"]["torch"] == torch.__version__
    assert "nvfp4:row" in (whole / "precision.txt").read_text()
    assert (whole / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    found = rows(whole)
    assert [row["step"] for row in found] == list(range(1, 9))
    assert found[-1]["val_loss"] < found[0]["loss"]
    # 2 sequences of 16 tokens, 2 experts a token, in each of 2 layers.
    assert [sum(layer) for layer in found[-1]["tokens_per_expert"]] == [64, 64]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]


def test_the_same_command_gives_the_same_run(data: Path, whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert (
        main(["pretrain", "--config", str(whole / "config.toml"), "--out", str(again), "--data", str(data)])
        == 0
    )
    assert rows(again) == rows(whole)


def test_the_last_line_compares_with_the_unigram_entropy(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "pretrain",
        "micro",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "r"),
        "--recipe",
        "bf16",
        "--steps",
        "2",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert "the unigram entropy" in out[-1]
    assert "exact numerics, emulated" in "\n".join(out)


def test_sampling_is_a_function_of_the_seed(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(model: Path, seed: str) -> str:
        words = ["sample", str(model), "--prompt", "the state", "--max-new-tokens", "12", "--seed", seed]
        assert main(words) == 0
        captured = capsys.readouterr()
        assert "recipe inkling" in captured.err
        return captured.out

    text = sample(whole, "1")
    assert text.startswith("the state")
    assert sample(whole / "checkpoints" / "step_00000008", "1") == text
    assert sample(whole / "checkpoints" / "step_00000008" / "model", "1") == text
    assert sample(whole, "2") != text
    escaped = "state \N{LATIN SMALL LETTER E WITH ACUTE}".encode().decode("ascii", "surrogateescape")
    assert main(["sample", str(whole), "--prompt", escaped, "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("state \N{LATIN SMALL LETTER E WITH ACUTE}")


def test_a_text_ends_where_the_model_ends(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`micro` reads 256 tokens."""
    words = ["sample", str(whole), "--max-new-tokens", "9999", "--prompt"]
    assert main([*words, "the state" * 12]) == 0
    captured = capsys.readouterr()
    assert "tokens fit behind the prompt: the model reads 256" in captured.err
    assert captured.out.startswith("the state")
    assert main([*words, "the state" * 99]) == 1
    assert "tokens, and the model reads 256; shorten it" in capsys.readouterr().err


def test_the_model_folder_loads_in_transformers_with_the_weights_of_the_run(whole: Path) -> None:
    from nybble.checkpoints.hub import load_model

    folder = whole / "checkpoints" / "step_00000008" / "model"
    theirs = Inkling2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(whole, recipe="bf16").model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the state of the union")["input_ids"]) == "the state of the union"
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_damaged_model_folder_is_refused_in_one_line(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused() -> str:
        assert main(["sample", str(folder), "--max-new-tokens", "1"]) == 1
        error = capfd.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    folder = tmp_path / "model"
    shutil.copytree(whole / "checkpoints" / "step_00000008" / "model", folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    save_file({k: v for k, v in tensors.items() if "w2" not in k}, weights, {"format": "pt"})
    assert "lacks 2 of the model's weights, such as model.layers.0.mlp.experts.down_proj" in refused()
    save_file(tensors, weights, {"format": "pt"})
    config.write_text(json.dumps(settings | {"hidden_size": 128}))
    assert "its weights have other shapes than its config.json says" in refused()
    config.write_text("[]")
    assert "config.json" in refused()
    config.write_text(json.dumps(settings))
    os.truncate(weights, 5000)
    assert "model.safetensors: truncated" in refused()


def test_existing_runs_are_left_alone(
    data: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    words = ["pretrain", "micro", "--data", str(data), "--out", str(whole)]
    assert main(words) == 1
    assert "already holds a run" in capsys.readouterr().err
    assert main([*words, "--resume", "--lr", "0.5"]) == 1
    assert "lr is 0.5, but the run to resume has 0.01" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*words, "--overwrite", "--wandb", "project"]) == 1
    assert "--wandb needs the extra" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_resumes_to_nothing_and_more_steps_go_on(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    words = ["pretrain", "--resume", "--out", str(out)]
    assert main(words) == 0
    assert rows(out) == rows(whole)
    assert main([*words, "--steps", "10"]) == 0
    assert [row["step"] for row in rows(out)] == list(range(1, 11))
    assert rows(out)[:8] == rows(whole)
    os.remove(next((out / "checkpoints" / "step_00000010" / "tensors").iterdir()))
    capsys.readouterr()
    assert main([*words, "--steps", "12"]) == 1
    error = capsys.readouterr().err
    assert "is missing from the checkpoint; delete" in error
    assert error.count("\n") == 1
