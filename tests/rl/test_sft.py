"""Fine-tuning learns solutions, and only those; a run resumes; what cannot work is named."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

import ranks
from rl_cases import rows, tiny_folder

from nybble.checkpoints.hub import load_model
from nybble.cli import main
from nybble.data.tokenizer import SMALLEST_VOCAB, train_tokenizer
from nybble.errors import ConfigError, DataError
from nybble.pretrain.config import (
    BatchConfig,
    CheckpointConfig,
    OptimiserConfig,
    ScheduleConfig,
    ValidationConfig,
)
from nybble.rl.problems import Problems, held_out
from nybble.rl.sft import SFTConfig, fine_tune
from nybble.rl.solved import SolvedProblems
from nybble.rl.tasks import TaskConfig, choose_solution, find_task, parse_styles


def config(model: str, out: Path, steps: int = 4) -> SFTConfig:
    return SFTConfig(
        model=model,
        out=out,
        device="cpu",
        batch=BatchConfig(batch=2, sequence=40, mask_documents=True),
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=0.0),
        optimiser=OptimiserConfig(lr=1e-2),
        validation=ValidationConfig(val_every=0, val_batches=1),
        checkpoint=CheckpointConfig(save_every=2),
    )


def test_solutions_are_learned_and_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    model = str(tiny_folder(tmp_path / "model"))
    assert fine_tune(config(model, tmp_path / "whole")) == 0
    losses = [row["loss"] for row in rows(tmp_path / "whole")]
    assert losses[-1] < losses[0] - 0.5
    part = config(model, tmp_path / "parts")
    assert fine_tune(replace(part, schedule=replace(part.schedule, steps=2))) == 0
    assert fine_tune(part, resume=True) == 0
    assert [row["loss"] for row in rows(tmp_path / "parts")] == losses
    assert load_model(tmp_path / "whole").recipe.name == "inkling"


def test_only_solutions_are_targets_and_held_out_prompts_are_not_seen() -> None:
    tokenizer = train_tokenizer([], SMALLEST_VOCAB)
    problems = Problems(find_task(TaskConfig(task="arithmetic", level=3)), tokenizer, 100)
    batch = BatchConfig(batch=3, sequence=64, mask_documents=True)
    data = SolvedProblems(problems, tokenizer, batch, partial(choose_solution, weights={}, seed=0))
    batch = next(data)
    for ids, labels, docs in zip(batch["input_ids"], batch["labels"], batch["doc_ids"], strict=True):
        assert docs.max() >= 2, "packed"
        for document in range(int(docs.max()) + 1):
            mine = docs == document
            line = tokenizer.decode(ids[mine].tolist())
            answer = labels[mine]
            prompt = line[: line.index("\n") + 1]
            assert not held_out(prompt)
            text = tokenizer.decode(answer[answer != -100].tolist(), skip_special_tokens=True)
            assert line == prompt + text, "the last target is the end token, which is no input"
            assert answer[answer != -100][-1] == tokenizer.eot_id
        assert (labels[docs == -1] == -100).all()
    position = data.state_dict()
    after = next(data)
    data.load_state_dict(position)
    assert all(torch.equal(after[name], again) for name, again in next(data).items())


def test_styles_are_mixed_by_weight_and_all_earn_the_reward() -> None:
    task, weights = find_task(TaskConfig(task="chain", level=4)), parse_styles("worked, direct=3")
    assert weights == {"worked": 1.0, "direct": 3.0}
    worked = 0
    for index in range(400):
        problem = task.problem(index)
        text = choose_solution(problem, index, weights, seed=1)
        assert text == choose_solution(task.problem(index), index, weights, seed=1)
        assert problem.reward(text) == 1.0
        assert text.count("\n") in (0, sum(map(problem.prompt.count, "+-")) - 1)
        worked += "\n" in text
    assert 70 < worked < 130
    assert choose_solution(task.problem(0), 0, {}, seed=1) == task.problem(0).solution


@pytest.mark.parametrize(
    "text", ["worked=0", "worked=x", "worked,worked", "worked=-1", "worked=nan", ",", "=3", "a,,b"]
)
def test_styles_that_cannot_be_mixed_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="write them as worked=1,direct=3"):
        SFTConfig(styles=text)


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    model = str(tiny_folder(tmp_path / "model"))
    alone, shared = (replace(config(model, tmp_path / n, steps=2), recipe="bf16") for n in ("one", "two"))
    assert fine_tune(alone) == 0
    assert ranks.run(2, fine_tune, shared) == [0, 0]
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5), "a mean over targets, not over ranks"
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=2e-3)
    # AdamW's first update is nearly a sign, so what BF16 rounds otherwise shows.
    assert two[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-3)
    assert two[1]["val_loss"] == pytest.approx(one[1]["val_loss"], rel=1e-3)
    assert load_model(tmp_path / "two").model.config.num_hidden_layers == 3


def test_what_cannot_work_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_folder(tmp_path / "model"))
    short = replace(config(model, tmp_path / "run"), batch=BatchConfig(batch=1, sequence=12))
    with pytest.raises(DataError, match="raise --sequence, which is 12"):
        fine_tune(short)
    gym = replace(config(model, tmp_path / "run"), task=TaskConfig(task="rl_cases:Troubled"))
    with pytest.raises(ConfigError, match="name a run, a folder with a model, or a preset: nano"):
        fine_tune(replace(gym, model=""))
    with pytest.raises(
        DataError, match="problem 0 has no solution in style 'worked'; its styles are direct, bare"
    ):
        fine_tune(replace(config(model, tmp_path / "run"), styles="worked"))
    plain = replace(config(model, tmp_path / "run"), task=TaskConfig(task="rl_cases:Letters"))
    with pytest.raises(DataError, match="no solution in style 'bare'; the task has no styles"):
        fine_tune(replace(plain, styles="bare"))
    chain = replace(config(model, tmp_path / "run"), task=TaskConfig(task="chain"))
    with pytest.raises(DataError, match="no solution in style 'slow'; its styles are worked, direct, bare"):
        fine_tune(replace(chain, styles="slow"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "recipe.toml"):
        (tmp_path / "llama" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    for words, message in [
        (
            ["rl", str(tmp_path / "llama")],
            "is a model of type 'llama'; the commands run those of inkl",
        ),
        (["rl", "--resume", "--out", str(tmp_path / "none")], "holds no run to resume"),
        (["rl", str(tmp_path / "none")], "does not exist"),
        (["rl", model, "--task", "arithmetik"], "did you mean arithmetic"),
        (["sft", "nano", "--level", "0"], "level is 0"),
        (["rl", model, "--sample-only", "--rollouts", "x"], "trains without sampling"),
    ]:
        assert main(words) == 1
        assert message in capsys.readouterr().err
