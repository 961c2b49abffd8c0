"""`nybble pretrain` on two ranks: the losses of one process, kills, restarts, and other numbers of ranks."""

import json
import shutil
import signal
import tomllib
from pathlib import Path

import micro
import pytest
import ranks
import run_cases
import tomli_w

from nybble.pretrain.metrics import TIMING_FIELDS
from nybble.recipes import LEGS, load_recipe

STEPS = 4


def rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING_FIELDS} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, a recipe with plain legs, and the words of the run that all tests make."""
    base = tmp_path_factory.mktemp("ranks")
    micro.make_data(base)
    plain = load_recipe("inkling").to_dict() | {"traffic": dict.fromkeys(LEGS, "fp32")}
    (base / "plain.toml").write_text(tomli_w.dumps(plain))
    return base


def words(folder: Path, out: str, recipe: str = "plain.toml", *more: str) -> list[str]:
    named = {
        "data": folder / "data", "out": folder / out, "recipe": folder / recipe, "steps": STEPS, "batch": 2,
        "sequence": 32, "save-every": 2, "val-every": 2, "threads": 1, "keep": 3,
    }  # fmt: skip
    return ["micro", *(word for key, value in named.items() for word in (f"--{key}", str(value))), *more]


@pytest.fixture(scope="module")
def two(folder):
    """A run of two ranks."""
    ranks.run(2, run_cases.pretrain, words(folder, "two"))
    return folder / "two"


@pytest.fixture(scope="module")
def one(folder):
    """The same run of one process."""
    ranks.run(1, run_cases.pretrain, words(folder, "one"))
    return folder / "one"


def test_losses_equal_those_of_one_process(one, two):
    """Experts shared out, the rest sharded; NVFP4 and stochastic rounding. Sums over ranks may end
    otherwise."""
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("loss", "grad_norm", *(["val_loss"] if "val_loss" in a else [])):
            assert b[name] == pytest.approx(a[name], rel=1e-5)
        assert a.get("tokens_per_expert") == b.get("tokens_per_expert")


def test_experts_gathered_as_codes_are_those_gathered_whole(folder):
    """Both ranks have all experts. Codes are kept over micro-batches, and another number of ranks goes on."""
    more = ["--expert-parallel", "1", "--accumulate", "2", "--no-reshard"]
    whole, codes = (
        words(folder, f"gather-{how}", "plain.toml", *more, "--gather", how) for how in ("fp32", "nvfp4")
    )
    ranks.run(2, run_cases.pretrain, whole)
    ranks.run(2, run_cases.pretrain, codes)
    assert rows(folder / "gather-nvfp4") == rows(folder / "gather-fp32")
    run = folder / "gather-nvfp4"
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    ranks.run(1, run_cases.pretrain, [*codes, "--resume"])
    assert rows(run)[-1]["loss"] == pytest.approx(rows(folder / "gather-fp32")[-1]["loss"], rel=1e-5)


def test_nothing_reads_gathered_weights_that_are_given_back(folder, two):
    poisoned = words(folder, "poisoned")
    ranks.run(2, run_cases.with_poison, poisoned)
    assert rows(folder / "poisoned") == rows(two)


def test_ranks_with_the_whole_model_each_go_on_where_one_process_stopped(folder, one):
    """Gradients are summed once a step. Blocks along the tokens end elsewhere than in one process."""
    run = folder / "copies"
    shutil.copytree(one, run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    ranks.run(2, run_cases.pretrain, words(folder, "copies", "plain.toml", "--replicate", "2", "--resume"))
    assert len(rows(run)) == STEPS
    for a, b in zip(rows(one)[2:], rows(run)[2:], strict=True):
        for name in ("loss", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-4)


def test_muon_takes_whole_matrices_of_which_ranks_hold_parts(folder):
    """Its products are in BF16, where a last bit of a gradient may change a step by some thousandths."""
    for world in (1, 2):
        ranks.run(
            world, run_cases.pretrain, words(folder, f"muon-{world}", "plain.toml", "--optimiser", "muon")
        )
    for a, b in zip(rows(folder / "muon-1"), rows(folder / "muon-2"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


def test_the_exchanges_are_in_the_metrics(two):
    row = json.loads((two / "metrics.jsonl").read_text().splitlines()[0])
    sent = row["exchange_bytes_per_token"]
    assert set(sent) == {"sizes", "routing", *LEGS, "routing_backward"} == set(row["exchange_wait_s"])
    # Two layers of 64 FP32 values; a token goes to the one other rank, or not.
    assert 0 < sent["dispatch"] == sent["combine_backward"] <= 2 * 64 * 4
    assert sent["combine"] == sent["dispatch_backward"] == sent["dispatch"]


def test_a_killed_rank_ends_the_run_and_a_restart_is_exact(folder, two):
    _store, environment = ranks.launcher()
    job = ranks.start(2, run_cases.pretrain, words(folder, "killed"), 3, **environment)
    survivor, killed = job.wait(180)
    assert killed == (False, -signal.SIGKILL)
    assert not survivor[0]
    assert "step 4" in str(survivor[1]), survivor  # in steps from 1, as they are printed
    assert len(rows(folder / "killed")) == 3
    # The launcher repeats the command; that of a second machine would not count it as a restart.
    again = ranks.start(2, run_cases.pretrain, words(folder, "killed"), **environment)
    assert [ok for ok, _ in again.wait(180)] == [True, True]
    assert rows(folder / "killed") == rows(two)


def test_a_refused_start_that_the_launcher_repeats_leaves_a_finished_run_alone(folder, two):
    _store, environment = ranks.launcher()
    shutil.copytree(two, folder / "finished")
    for count in "01":
        job = ranks.start(
            2, run_cases.pretrain, words(folder, "finished"), TORCHELASTIC_RESTART_COUNT=count, **environment
        )
        assert all(not ok and "already holds a run" in text for ok, text in job.wait(120))
    assert rows(folder / "finished") == rows(two)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder, one, two):
    """From a state that is equal but for the order of additions come losses that are."""
    run = folder / "from-two"
    shutil.copytree(two, run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    ranks.run(1, run_cases.pretrain, words(folder, "from-two", "plain.toml", "--resume"))
    continued = rows(run)
    assert len(continued) == STEPS
    assert "exchange_bytes_per_token" not in continued[-1]
    assert continued[-1]["loss"] == pytest.approx(rows(one)[-1]["loss"], rel=1e-5)


def test_a_missing_shard_is_named(folder, two):
    run = folder / "torn"
    shutil.copytree(two, run)
    shards = sorted((run / "checkpoints" / f"step_{STEPS:08d}" / "tensors").iterdir())
    assert len(shards) == 2
    shards[1].unlink()
    results = ranks.start(2, run_cases.pretrain, words(folder, "torn", "plain.toml", "--resume")).wait(120)
    assert all(not ok and f"{shards[1].name} is missing from the checkpoint" in text for ok, text in results)


def test_the_exported_folder_is_whole(one, two):
    from safetensors.torch import load_file

    whole, gathered = (
        load_file(run / f"checkpoints/step_{STEPS:08d}/model/model.safetensors") for run in (one, two)
    )
    assert whole.keys() == gathered.keys()
    for name, weight in whole.items():
        assert gathered[name].shape == weight.shape
        assert (gathered[name] - weight).abs().max() < 1e-4, name
    config = json.loads((two / f"checkpoints/step_{STEPS:08d}/model/config.json").read_text())
    assert not config["architectures"][0].startswith("FSDP")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--expert-parallel", "3"], "expert_parallel is 3, which does not divide the 2 ranks"),
        (["--replicate", "5"], "replicate is 5, which does not divide the 2 ranks"),
        (["--gather", "nvfp4"], "gather nvfp4 has nothing to gather: no two ranks have the same experts"),
        (
            ["--gather", "bf16", "--replicate", "2"],
            "gather bf16 has nothing to gather: each rank has the whole",
        ),
        (
            ["--compile"],
            "compile works with several ranks only where each has the whole model: add --replicate 2",
        ),
        (["--batch", "3"], "batch is 3 sequences, which 2 ranks cannot share out equally"),
    ],
)
def test_settings_that_no_ranks_can_follow_are_refused(folder, more, sentence):
    _store, environment = ranks.launcher()
    refused = words(folder, "refused", "plain.toml", *more)
    results = ranks.start(2, run_cases.pretrain, refused, **environment).wait(120)
    assert all(not ok and sentence in text for ok, text in results)
    # One of them says it, and which one.
    assert sorted("OtherRankError" in text.splitlines()[-1] for _, text in results) == [False, True]
    assert sum(f"rank {rank}: {sentence}" in text for rank, (_, text) in enumerate(results)) == 1
    assert not (folder / "refused" / "metrics.jsonl").exists()


def test_ranks_with_different_recipes_are_refused(folder):
    results = ranks.start(
        2, run_cases.with_own_recipe, words(folder, "unlike"), words(folder, "unlike", "other.toml")
    )
    changed = tomllib.loads((folder / "plain.toml").read_text()) | {"traffic": dict.fromkeys(LEGS, "mxfp8")}
    (folder / "other.toml").write_text(tomli_w.dumps(changed))
    first, second = results.wait(120)
    assert "rank 1 does not agree with rank 0 on recipe" in first[1]
    assert "OtherRankError" in second[1]
