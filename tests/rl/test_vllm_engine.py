"""An external engine: four-bit weights by folder, completions over HTTP, and clear words when it fails."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from rl_cases import rl_config, rows, tiny_folder
from vllm_standin import standin

from nybble.checkpoints.validate import ValidateConfig, validate
from nybble.errors import ConfigError, EngineError
from nybble.rl import rollout as files
from nybble.rl import vllm
from nybble.rl.config import EngineConfig, EvaluationConfig
from nybble.rl.loss import LossConfig
from nybble.rl.start import reinforce


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PAUSE_S", 0.0)


def test_a_run_sends_its_four_bit_weights_and_trains_on_what_comes_back(model: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    with standin(served) as server:
        server.faults["overloaded"] = 2  # tried again
        engine = EngineConfig(engine="vllm", url=server.url, export_to=served)
        config = rl_config(model, tmp_path / "run", engine=engine, evaluation=EvaluationConfig(eval_every=0))
        assert reinforce(replace(config, schedule=replace(config.schedule, steps=2))) == 0
    calls = [path for path, _ in server.calls[2:]]
    step = ["/collective_rpc", "/reset_prefix_cache", "/v1/completions", "/v1/completions"]
    assert calls == step * 2
    assert len(set(server.weights)) == 2, "an update was sent"
    assert not [file for file in served.iterdir() if file.is_dir()]
    report = validate(ValidateConfig(checkpoint=served))
    assert not report.problems, report.text()
    body = server.calls[-1][1]
    assert body["n"] == 4
    assert body["max_tokens"] == 5
    assert all(isinstance(token, int) for token in body["prompt"])
    row = rows(tmp_path / "run")[0]
    assert row["mismatch_k3"] > 0, "the stand-in's probabilities are not the model's"
    assert "mismatch_experts" not in row
    assert len(files.read(tmp_path / "run" / "rollouts" / "step_00000001.jsonl")) == 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no development mode", "VLLM_SERVER_DEV_MODE"),
        ("another vocabulary", "another model or tokenizer"),
        ("no token ids", "without usable token_ids"),
        ("overloaded", "does not answer .*--resume"),
        ("no letters", "answered with no JSON"),
        ("cut off", "does not answer .*IncompleteRead"),
    ],
)
def test_faults_of_the_server_are_named(fault: str, message: str, model: Path, tmp_path: Path) -> None:
    with standin(tmp_path / "served") as server:
        server.faults[fault] = 10
        engine = EngineConfig(engine="vllm", url=server.url, export_to=tmp_path / "served")
        config = rl_config(model, tmp_path / "run", engine=engine, evaluation=EvaluationConfig(eval_every=0))
        with pytest.raises(EngineError, match=message):
            reinforce(config)


def test_a_dead_server_loses_no_rollout(model: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    with standin(served) as server:
        engine = EngineConfig(engine="vllm", url=server.url, export_to=served)
        config = rl_config(model, tmp_path / "run", engine=engine, evaluation=EvaluationConfig(eval_every=0))
        config = replace(config, schedule=replace(config.schedule, steps=1))
        completions = [0]

        def dies(body: dict, index: int) -> dict:
            completions[0] += 1
            if completions[0] > 4:
                raise ConnectionResetError
            return type(server).choice(server, body, index)

        server.choice = dies
        with pytest.raises(EngineError, match="does not answer"):
            reinforce(config)
    path = tmp_path / "run" / "rollouts" / "step_00000000.jsonl"
    saved = path.read_bytes()
    assert len(files.read(path)) == 4
    with standin(served) as server:
        config = replace(config, engine=replace(config.engine, url=server.url))
        assert reinforce(config, resume=True) == 0
    assert path.read_bytes().startswith(saved)
    assert len(files.read(path)) == 8


def test_settings_without_a_folder_or_with_replay_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="export_to"):
        EngineConfig(engine="vllm")
    for url in ("http://::1:8000", "http://[zz]:8000"):
        with pytest.raises(ConfigError, match="url"):
            EngineConfig(url=url)
    with pytest.raises(ConfigError, match="timeout_s is inf s; it must be above 0 and at most"):
        EngineConfig(timeout_s=math.inf)
    engine = EngineConfig(engine="vllm", url="http://[2001:DB8::1]:8000", export_to=tmp_path)
    with pytest.raises(ConfigError, match="router_replay"):
        rl_config(model, tmp_path, engine=engine, loss=LossConfig(router_replay=True))
