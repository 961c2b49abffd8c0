"""`nybble compare`: paired runs, nothing made twice, and a report that says what is missing."""

import csv
import json
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

from nybble.cli import main
from nybble.commands import compare_runs
from nybble.errors import NonFiniteError
from nybble.models import presets
from nybble.pretrain.metrics import read


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    before, shipped = torch.get_num_threads(), presets._PRESETS
    add_preset()
    yield
    presets._PRESETS = shipped
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


WORDS = ["--recipes", "bf16,mxfp8", "--seeds", "2", "--steps", "8", "--lengths", "0.5", "--jobs", "1"]


def words(data: Path, out: Path, *more: str) -> list[str]:
    return ["compare", "micro", "--data", str(data), "--out", str(out), *WORDS, "--questions", "3", *more]


@pytest.fixture(scope="module")
def compared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "out"
    assert main(words(data, out)) == 0
    return out


def test_the_report_has_a_table_a_plot_and_the_command_that_remakes_it(compared: Path) -> None:
    report = (compared / "report.md").read_text()
    assert "| `bf16` | 2 |" in report
    assert "made by `nybble compare micro --recipes bf16,mxfp8 --seeds 2 --data" in report
    assert "--steps 8 --lengths 0.5 --questions 3`" in report
    rows = list(csv.DictReader((compared / "table.csv").read_text().splitlines()))
    assert [row["recipe"] for row in rows] == ["bf16", "mxfp8"]
    last = [read(compared / "micro" / "mxfp8" / f"seed-{s}" / "metrics.jsonl")[-1] for s in (0, 1)]
    base = [read(compared / "micro" / "bf16" / f"seed-{s}" / "metrics.jsonl")[-1] for s in (0, 1)]
    gaps = [100 * (a["val_loss"] / b["val_loss"] - 1) for a, b in zip(last, base, strict=True)]
    assert float(rows[1]["gap_percent"]) == pytest.approx(sum(gaps) / 2, rel=1e-4)
    half = 12.706 * abs(gaps[0] - gaps[1]) / 2  # Student's t of one degree of freedom
    assert float(rows[1]["gap_percent_high"]) == pytest.approx(sum(gaps) / 2 + half, rel=1e-3)
    assert (compared / "compare.png").read_bytes().startswith(b"\x89PNG")
    runs = [json.loads(line) for line in (compared / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 6
    assert {(run["recipe"], run["share"]) for run in runs} == {("bf16", 0.5), ("bf16", 1.0), ("mxfp8", 1.0)}


def test_runs_of_a_seed_begin_alike_and_see_the_same_data(compared: Path) -> None:
    """In its first step a recipe differs by rounding alone; another seed differs by far more."""
    first = {
        (recipe, seed): read(compared / "micro" / recipe / f"seed-{seed}" / "metrics.jsonl")[0]["loss"]
        for recipe in ("bf16", "mxfp8")
        for seed in (0, 1)
    }
    paired = abs(first["bf16", 0] - first["mxfp8", 0])
    assert 0 < paired < 0.02
    assert abs(first["bf16", 0] - first["bf16", 1]) > 2 * paired


def test_what_is_done_is_not_made_again_and_more_seeds_are_added(
    data: Path, compared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    original = compare_runs.run
    monkeypatch.setattr(compare_runs, "run", lambda task: made.append(task.name) or original(task))
    assert main(words(data, compared)) == 0
    assert made == []
    assert main(words(data, compared, "--recipes", "bf16,mxfp8,inkling", "--seeds", "1", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "1 of 4 runs to make" in out
    assert "about 0:00:" in out
    assert made == []
    (compared / "micro" / "mxfp8" / "seed-1" / "choices.json").unlink()
    assert main(words(data, compared)) == 0
    assert made == ["micro mxfp8 seed 1"]


def test_a_report_of_what_is_done_runs_nothing(
    data: Path, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(compared, out)
    shutil.rmtree(out / "micro" / "mxfp8" / "seed-1")
    assert main(words(data, out, "--report-only")) == 0
    report = capsys.readouterr().out
    assert "1 of 6 runs are missing" in report
    assert "no pair of runs for seed 1; its intervals are of 1 instead of 2 seeds" in report
    assert not (out / "micro" / "mxfp8" / "seed-1").exists()
    assert main(words(data, tmp_path / "nothing", "--report-only")) == 1
    assert "no run is done in" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(data, tmp_path / "new", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "micro: 6 runs of up to 8 steps and 256 tokens" in out
    assert "6 of 6 runs to make" in out
    assert "floating-point operations" in out
    assert main(words(data, tmp_path / "new", "--dry-run", "--ladder", "2")) == 0
    assert "micro: 8 runs of up to 16 steps and 512 tokens" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_recipe_that_does_not_fit_a_model_stops_before_any_run(
    data: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('name = "bad"\n[[rule]]\nmodules = "nowhere.*"\nall = "mxfp8"\n', encoding="utf-8")
    assert main(words(data, tmp_path / "out", "--recipes", f"bf16,{bad}", *flags)) == 1
    assert "matches no module" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_that_differ_in_more_than_precision_are_refused(
    data: Path, compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (compared / "report.md").read_bytes()
    assert main(words(data, compared, "--batch", "3")) == 1
    error = capsys.readouterr().err
    assert (
        "batch.batch 2, this comparison has 3: recipes are compared only where they differ in nothing"
        in error
    )
    table = compared / "micro" / "mxfp8" / "seed-0" / "precision.txt"
    text = table.read_text()
    table.write_text(text.replace("recipe mxfp8 (", "recipe mxfp8 (0", 1))
    assert main(words(data, compared)) == 1
    assert "another version of the recipe mxfp8" in capsys.readouterr().err
    table.write_text(text)
    assert (compared / "report.md").read_bytes() == before


def test_a_diverged_run_is_reported_and_a_missing_seed_widens_the_interval(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nybble.pretrain import start

    original = start.pretrain
    reason = "step 3: the loss is nan and the gradient norm nan: first seen in the output of model.layers.1"

    def pretrain(config: Any, **how: Any) -> int:
        if (config.recipe, config.seed) == ("mxfp8", 1):
            raise NonFiniteError(reason)
        return original(config, **how)

    monkeypatch.setattr(start, "pretrain", pretrain)
    flags = ["--questions", "0", "--lengths", "", "--steps", "2"]
    assert main(words(data, tmp_path / "out", *flags)) == 0
    report = capsys.readouterr().out
    assert f"micro, `mxfp8`, seed 1 diverged: {reason}" in report
    assert "(one seed)" in report
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [run["diverged"] for run in runs if run["diverged"]] == [reason]
    monkeypatch.setattr(start, "pretrain", original)
    assert main(words(data, tmp_path / "out", *flags)) == 0  # a result is not tried again
    assert reason in capsys.readouterr().out


def test_a_run_that_fails_is_named_and_the_others_are_made(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nybble.pretrain import start

    original = start.pretrain

    def pretrain(config: Any, **how: Any) -> int:
        if (config.recipe, config.seed) == ("mxfp8", 0) or "none" in config.out.parts:
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return original(config, **how)

    monkeypatch.setattr(start, "pretrain", pretrain)
    flags = ["--questions", "0", "--lengths", "", "--steps", "2"]
    assert main(words(data, tmp_path / "none", *flags)) == 1
    assert capsys.readouterr().err.startswith("error: 4 of 4 runs failed (micro bf16 seed 0, ")
    assert main(words(data, tmp_path / "out", *flags)) == 1
    out, error = capsys.readouterr()
    assert "micro mxfp8 seed 0: failed: RuntimeError: CUDA error: out of memory (all of it in " in out
    assert "1 of 4 runs are missing" in out
    assert "1 of 4 runs failed (micro mxfp8 seed 0); the same line tries them again" in error
    assert "and more lines" in (tmp_path / "out" / "micro" / "mxfp8" / "seed-0" / "log.txt").read_text()
    monkeypatch.setattr(start, "pretrain", original)
    assert main(words(data, tmp_path / "out", *flags)) == 0
    assert "1 of 4 runs to make" in capsys.readouterr().out


@pytest.mark.parametrize(("jobs", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_ends_a_comparison_with_its_status_and_the_same_line_goes_on(
    data: Path, tmp_path: Path, jobs: int, number: signal.Signals
) -> None:
    """The signal reaches the comparison's own process alone, which passes it on to its workers."""
    script, out = Path(__file__).with_name("micro.py"), tmp_path / "out"
    line = words(data, out, "--steps", "100000", "--questions", "0", "--jobs", str(jobs))
    process = subprocess.Popen(
        [sys.executable, str(script), *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first = out / "micro" / "bf16" / "seed-0-of-0.5" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (first.exists() and first.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert error.endswith("stopped: 6 of 6 runs are left; the same line makes them\n")
    assert list(first.parent.glob("checkpoints/step_*"))  # so that it goes on from there


def test_summaries_are_enough_to_go_on_elsewhere_and_to_report_without_the_data(
    data: Path, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (compared / "runs.jsonl").read_text().splitlines(keepends=True)
    some = tmp_path / "some.jsonl"
    some.write_text("".join(line for line in lines if json.loads(line)["seed"] == 0))
    out = tmp_path / "elsewhere"
    assert main(words(data, out, "--known", str(some))) == 0
    said = capsys.readouterr().out
    assert "3 of 6 runs to make" in said
    assert not (out / "micro" / "bf16" / "seed-0").exists()
    assert (out / "micro" / "bf16" / "seed-1").exists()
    assert (out / "table.csv").read_text() == (compared / "table.csv").read_text()

    alone = tmp_path / "alone"
    known = ["--known", str(out / "runs.jsonl"), "--report-only"]
    assert main(words(tmp_path / "no-data", alone, *known)) == 0
    assert (alone / "table.csv").read_text() == (compared / "table.csv").read_text()
    capsys.readouterr()
    assert main(words(data, alone, *known, "--batch", "3")) == 1
    assert "micro bf16 seed 0, 0.5 of the length was made with other settings" in capsys.readouterr().err
    older = [json.dumps(json.loads(line) | {"recipe_hash": "older"}) + "\n" for line in lines]
    some.write_text("".join(older))
    assert main(words(tmp_path / "no-data", alone, "--known", str(some), "--report-only")) == 0
    assert main(words(data, alone, "--known", str(some))) == 1
    assert "made with other recipe (older, here " in capsys.readouterr().err
    some.write_text(lines[0] + older[1])
    assert main(words(data, alone, "--known", str(some), "--report-only")) == 1
    assert "two versions of the recipe" in capsys.readouterr().err
    known = ["--known", str(out / "runs.jsonl"), str(some), "--report-only"]
    some.write_text("".join(lines))
    assert main(words(data, alone, *known)) == 0  # the same runs with the same results
    some.write_text(json.dumps(json.loads(lines[0]) | {"val_loss": 9.0}))
    assert main(words(data, alone, *known)) == 1
    said = capsys.readouterr().err
    assert f"{out}/runs.jsonl and {some} both have micro bf16 seed 0, 0.5 of the length, with two" in said
    assert "9.0000 nats a token); take it out of one of them" in said
    some.write_text("{}\n")
    assert main(words(data, alone, "--known", str(some))) == 1
    assert "some.jsonl, line 1 is no summary of a run" in capsys.readouterr().err


def test_without_checkpoints_a_run_leaves_its_figures_alone(
    data: Path, compared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(words(data, out, "--no-save")) == 0
    assert not list(out.rglob("step_*"))
    assert (out / "table.csv").read_text() == (compared / "table.csv").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipes", "bf16"], "name at least two different ones"),
        (["--recipes", "bf16,bf16"], "name at least two different ones"),
        (["--recipes", "bf16,inklin"], "did you mean 'inkling'"),
        (["--seeds", "0"], "seeds is 0"),
        (["--lengths", "0.5,2"], "lengths is '0.5,2'; each must be a share"),
        (["--lengths", "half"], "write numbers with commas"),
        (["--ladder", "0.5,1"], "ladder is '0.5,1', but there are 1 presets; give each one length"),
        (["--ladder", "0"], "ladder is '0'; each must be a share of the steps, above 0"),
        (["--ladder", "nan"], "ladder is 'nan'; each must be a share of the steps, above 0"),
        (["--ladder", "1e400"], "ladder is '1e400'; each must be a share of the steps"),
        (["--steps", "-1"], "steps is -1"),
    ],
)
def test_bad_flags_name_themselves(
    data: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(data, tmp_path / "out", *flags)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
