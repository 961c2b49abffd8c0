"""Two ranks share a step: the same completions as one process, and the gradient of all of them."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

import ranks
from rl_cases import rl_config, rows, tiny_folder

from nybble.rl import rollout as files
from nybble.rl.start import reinforce


def share(model: Path, out: Path) -> int:
    """A run of two steps, on every rank."""
    config = rl_config(model, out, threads=1)
    config = replace(config, schedule=replace(config.schedule, steps=2))
    return reinforce(config)


@pytest.mark.skipif(sys.platform == "darwin", reason="gloo between forked processes is tested on Linux")
def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    assert share(model, tmp_path / "one") == 0
    assert ranks.run(2, share, model, tmp_path / "two") == [0, 0]
    first = {
        (r.problem, r.sample): r for r in files.read(tmp_path / "one" / "rollouts" / "step_00000000.jsonl")
    }
    both: dict = {}
    for name in ("step_00000000.jsonl", "step_00000000.rank1.jsonl"):
        mine = files.read(tmp_path / "two" / "rollouts" / name)
        assert len(mine) == 4
        both |= {(r.problem, r.sample): r for r in mine}
    assert both == first, "draws follow the problem, not the rank"
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    for key in ("reward", "rollouts", "groups", "sampled_tokens", "mismatch_k3", "eval_reward_before"):
        assert two[0].get(key) == one[0].get(key), key
    # Sums over tokens end in other bits when ranks add theirs.
    assert math.isclose(two[0]["grad_norm"], one[0]["grad_norm"], rel_tol=1e-4)
    assert math.isclose(two[0]["entropy"], one[0]["entropy"], rel_tol=1e-6)
    assert two[1]["mismatch_k3"] == 0.0, "both ranks made the same update"
