"""Whole runs: on policy nothing differs, a resume repeats what was, and no rollout is lost."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nemotron_h_cases import small_config
from rl_cases import PARAMS, STOP, requests, rl_config, rows, tiny_folder

from nybble.checkpoints.hub import load_model, save_model
from nybble.data.tokenizer import SMALLEST_VOCAB, train_tokenizer
from nybble.errors import ConfigError, DataError
from nybble.models import NemotronHForCausalLM
from nybble.pretrain.stop import StopRequest
from nybble.recipes import load_recipe
from nybble.rl import rollout as files
from nybble.rl.config import EvaluationConfig, SamplingConfig
from nybble.rl.loss import LossConfig
from nybble.rl.policy import Policy
from nybble.rl.sampler import sample
from nybble.rl.start import reinforce
from nybble.rl.tasks import TaskConfig
from nybble.rl.update import Updater


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def first_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two updates each."""
    out = tmp_path_factory.mktemp("runs") / "first"
    assert reinforce(rl_config(model, out, loss=LossConfig(updates=2))) == 0
    return out


def test_sampler_and_trainer_agree_exactly_and_the_run_is_written_down(first_run: Path) -> None:
    found = rows(first_run)
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert (row["mismatch_k3"], row["mismatch_ratio_mean"], row["mismatch_ratio_max"]) == (0.0, 1.0, 1.0)
        assert row["mismatch_experts"] == 0.0
        assert row["rollouts"] == 8
        assert row["grad_norm"] > 0
    assert ["eval_reward_before" in row for row in found] == [True, False, False]
    assert ["eval_reward" in row for row in found] == [False, True, True]
    assert (first_run / "plots" / "rl.png").stat().st_size > 10_000
    saved = files.read(first_run / "rollouts" / "step_00000001.jsonl")
    assert len(saved) == 8
    assert all(r.experts.shape == (len(r.prompt_tokens) + len(r.tokens) - 1, 3, 2) for r in saved)
    assert load_model(first_run).model.config.num_hidden_layers == 3


@pytest.mark.parametrize("updates_done", [1, 3, 4])
def test_a_run_that_was_stopped_or_killed_goes_on_as_if_it_had_not_been(
    updates_done: int, model: Path, first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rl_config(model, tmp_path / "run", loss=LossConfig(updates=2))
    stops: list[StopRequest] = []
    enter = StopRequest.__enter__
    monkeypatch.setattr(StopRequest, "__enter__", lambda self: stops.append(enter(self)) or stops[-1])
    update, calls = Updater.update, []

    def interrupted(self: Updater, *arguments: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("killed")  # between two checkpoints
        update(self, *arguments)
        if len(calls) == updates_done:
            stops[-1].signum = 15

    monkeypatch.setattr(Updater, "update", interrupted)
    if updates_done < 4:
        assert reinforce(config) == 143
    else:
        with pytest.raises(MemoryError):
            reinforce(config)
    monkeypatch.setattr(Updater, "update", update)
    assert reinforce(config, resume=True) == 0
    assert rows(tmp_path / "run") == rows(first_run)
    for path in (first_run / "rollouts").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "rollouts" / path.name).read_bytes()


def test_rollouts_that_a_kill_left_are_used_and_the_rest_is_sampled(
    model: Path, first_run: Path, tmp_path: Path
) -> None:
    config = rl_config(model, tmp_path / "run", loss=LossConfig(updates=2))
    assert reinforce(replace(config, schedule=replace(config.schedule, steps=1))) == 0
    text = (first_run / "rollouts" / "step_00000001.jsonl").read_text()
    part = tmp_path / "run" / "rollouts" / "step_00000001.jsonl"
    part.write_text(text[: len(text) * 2 // 3])  # one whole batch of four, and some of the second
    assert reinforce(config, resume=True) == 0
    assert part.read_text() == text
    assert rows(tmp_path / "run")[1:] == rows(first_run)[1:]


def test_a_run_that_began_without_evaluations_may_go_on_with_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(model, tmp_path / "run", evaluation=EvaluationConfig(eval_every=0))
    assert reinforce(replace(config, schedule=replace(config.schedule, steps=1))) == 0
    capsys.readouterr()
    config = replace(config, evaluation=EvaluationConfig(eval_every=1, eval_problems=1))
    assert reinforce(replace(config, schedule=replace(config.schedule, steps=2)), resume=True) == 0
    assert re.search(r"held out, greedy [01]\.\d+ after", capsys.readouterr().out)


def test_sampling_alone_and_training_alone_make_a_whole_step(model: Path, tmp_path: Path) -> None:
    config = rl_config(model, tmp_path / "both")
    config = replace(config, schedule=replace(config.schedule, steps=1))
    stale = tmp_path / "both" / "rollouts" / "step_00000000.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text("of another run\n")
    assert reinforce(config) == 0
    assert reinforce(replace(config, out=tmp_path / "sampled", sample_only=True)) == 0
    assert "loss" not in rows(tmp_path / "sampled")[0]
    given = tmp_path / "sampled" / "rollouts" / "step_00000000.jsonl"
    assert given.read_bytes() == (tmp_path / "both" / "rollouts" / "step_00000000.jsonl").read_bytes()
    assert reinforce(replace(config, out=tmp_path / "trained", rollouts=given)) == 0
    both, trained = rows(tmp_path / "both")[0], rows(tmp_path / "trained")[0]
    assert {key: trained[key] for key in ("loss", "grad_norm", "reward", "mismatch_k3")} == {
        key: both[key] for key in ("loss", "grad_norm", "reward", "mismatch_k3")
    }


def test_another_sampler_is_noticed_and_replay_brings_its_experts_back(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config(model, tmp_path / "apart", recipe="bf16", sample_recipe="mxfp4")
    config = replace(
        config, schedule=replace(config.schedule, steps=1), watch=replace(config.watch, warn_k3=0.0)
    )
    assert reinforce(config) == 0
    row = rows(tmp_path / "apart")[0]
    assert row["mismatch_k3"] > 0
    assert row["mismatch_ratio_max"] > 1
    assert row["mismatch_experts"] > 0
    said = capsys.readouterr().out
    assert "warning: step 1: k3 between sampler and trainer is" in said
    assert "sampler and trainer differ in" in said
    replayed = replace(config, out=tmp_path / "replay", loss=LossConfig(router_replay=True, tis=2.0, kl=0.1))
    assert reinforce(replayed) == 0
    row = rows(tmp_path / "replay")[0]
    assert row["mismatch_experts"] == 0.0
    assert row["kl_reference"] == 0.0, "the reference is the first policy, and replays the same experts"


def test_a_hybrid_is_trained_outside_the_batch_invariant_mode_alone(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], SMALLEST_VOCAB)
    hybrid = NemotronHForCausalLM(
        small_config(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eot_id)
    )
    save_model(tmp_path / "hybrid", hybrid, tokenizer, load_recipe("bf16"))
    config = rl_config(tmp_path / "hybrid", tmp_path / "run")
    config = replace(config, schedule=replace(config.schedule, steps=1))
    with pytest.raises(ConfigError, match=r"does not cover nemotron_h.*--no-batch-invariant"):
        reinforce(config)
    assert reinforce(replace(config, batch_invariant=False, loss=LossConfig(router_replay=True))) == 0
    row = rows(tmp_path / "run")[0]
    assert row["grad_norm"] > 0
    assert row["mismatch_k3"] < 1e-3
    assert row["mismatch_experts"] == 0.0


@pytest.mark.parametrize(("sampler", "trainer"), [("inkling", "inkling"), ("mxfp4", "bf16")])
def test_no_code_or_scale_of_older_weights_is_sampled_from(sampler: str, trainer: str, model: Path) -> None:
    changed = load_model(model, trainer).model
    policy = Policy(changed, load_recipe(sampler), load_recipe(trainer), seed=0, invariant=True)

    def draw(update: int) -> list[object]:
        policy.begin_sampling(update)
        few = replace(PARAMS, max_new_tokens=3)
        return sample(policy.model, requests(4), few, STOP, invariant=True)

    before = draw(0)
    policy.begin_training(0, 0)
    for p in changed.parameters():
        p.data.mul_(1.01)  # an update that no version counter sees
    after = draw(1)
    fresh = load_model(model, trainer).model
    for p in fresh.parameters():
        p.data.mul_(1.01)
    policy = Policy(fresh, load_recipe(sampler), load_recipe(trainer), seed=0, invariant=True)
    assert after == draw(1)
    assert [c.logprobs for c in after] != [c.logprobs for c in before]


def test_troubles_of_a_task_are_counted_and_nothing_is_lost(model: Path, tmp_path: Path) -> None:
    config = rl_config(model, tmp_path / "run", task=TaskConfig(task="rl_cases:Troubled"))
    config = replace(config, sampling=SamplingConfig(prompts=6, group=4, max_new_tokens=5))
    config = replace(config, schedule=replace(config.schedule, steps=1))
    assert reinforce(config) == 0
    row = rows(tmp_path / "run")[0]
    assert row["prompts_skipped"] >= 2
    assert 0 < row["reward_errors"] < 24
    saved = files.read(tmp_path / "run" / "rollouts" / "step_00000000.jsonl")
    assert len(saved) == row["rollouts"] == 24
    assert {r.error.split(":")[0] for r in saved} >= {"reward raised ZeroDivisionError", "reward is nan"}


def test_equal_rewards_change_nothing_and_are_counted(model: Path, tmp_path: Path) -> None:
    config = rl_config(model, tmp_path / "run", task=TaskConfig(task="arithmetic"))  # hopeless: all rewards 0
    assert reinforce(replace(config, schedule=replace(config.schedule, steps=1))) == 0
    row = rows(tmp_path / "run")[0]
    assert (row["groups_equal"], row["groups"], row["updates_idle"]) == (2, 2, 1)
    assert row["mismatch_k3"] == 0.0, "measured all the same"
    before, after = load_model(model).model.state_dict(), load_model(tmp_path / "run").model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_files_of_rollouts_that_cannot_be_used(model: Path, first_run: Path, tmp_path: Path) -> None:
    good = (first_run / "rollouts" / "step_00000000.jsonl").read_text().splitlines()
    row = json.loads(good[0])
    cases = {
        "is no rollout": "{}",
        "log-probabilities": json.dumps(row | {"logprobs": row["logprobs"][1:]}),
        "its tokens are of tokenizer": json.dumps(row | {"tokenizer": "0" * 12}),
        "model's is": json.dumps(row | {"tokens": [9999] * len(row["tokens"])}),
        "lower --prompts": good[0],
    }
    for message, line in cases.items():
        path = tmp_path / "rollouts.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(DataError, match=message):
            reinforce(rl_config(model, tmp_path / "run", rollouts=path))
    with pytest.raises(DataError, match="no such file of rollouts"):
        reinforce(rl_config(model, tmp_path / "run", rollouts=tmp_path / "none.jsonl"))
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_work_are_named_before_a_folder_is_made(model: Path, tmp_path: Path) -> None:
    config = rl_config(model, tmp_path / "run")
    with pytest.raises(ConfigError, match="model's window is 256"):
        reinforce(replace(config, sampling=replace(config.sampling, max_new_tokens=300)))
    with pytest.raises(ConfigError, match="model: name a run"):
        reinforce(replace(config, model=Path()))
    with pytest.raises(ConfigError, match="updates is 9"):
        replace(config, loss=LossConfig(updates=9))
    with pytest.raises(ConfigError, match="temperature is 0"):
        SamplingConfig(temperature=0.0)
    assert not (tmp_path / "run").exists()
