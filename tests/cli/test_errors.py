"""What the user can mend ends with one line on stderr and status 1, wrong flags with 2; help is quick."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nybble.models  # noqa: F401 - here, so that what other packages print at import is in no test's output
from nybble import cli, together
from nybble.errors import NybbleError
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.configfile import dump_run

LESS_MEMORY = "take a smaller model, fewer tokens at once, or a device with more memory"


def fails(capsys: pytest.CaptureFixture[str], words: str, status: int = 1) -> str:
    assert cli.main(words.split()) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain", "name the model to train: nano, tiny, mini, small"),
        ("pretrain tinny", "unknown preset 'tinny'; the presets are nano, tiny, mini, small"),
        (
            "pretrain tiny --data {tmp}/absent",
            "absent is not a prepared dataset (no dataset.json): run `nybble prepare`",
        ),
        ("pretrain tiny --lr -1", "lr is -1.0; it must be above 0"),
        ("pretrain tiny --config {tmp}/absent.toml", "absent.toml: no such settings file"),
        (
            "pretrain tiny --config {tmp}/typo.toml",
            "typo.toml: unknown key 'optimiser.lrr'; did you mean optimiser.lr?",
        ),
        ("pretrain tiny --resume --out {tmp}/absent", "holds no run to resume"),
        ("pretrain tiny --resume --overwrite", "give one of them"),
        ("prepare {tmp}/absent.txt --out {tmp}/data", "absent.txt"),
        ("sample {tmp}/absent", "absent does not exist"),
        ("sample {tmp}", "is no run, no checkpoint and no folder with a model"),
        ("sample {tmp}/served", "bring them back with nybble import"),
        ("pretrain tiny --resume --out {tmp}/rewarded", "holds a run of `nybble rl`; resume it with that"),
        ("sft tiny --resume --out {tmp}/rewarded", "holds a run of `nybble rl`; resume it with that"),
        ("sample {tmp} --top-p 0", "top_p is 0.0"),
        ("sample {tmp} --temperature -1", "temperature is -1.0"),
        ("sample {tmp} --max-new-tokens 0", "max_new_tokens is 0"),
        ("recipes inklink", "unknown recipe 'inklink'"),
        ("recipes {tmp}/format.toml", "nvfp5"),
        ("compare --known a --known b", "--known is there 2 times; give it once, with all of its values"),
        ("prepare sotu wordnet --weights 1 --weights=2", "--weights is there 2 times"),
        (
            "pretrain tiny --out= --steps 1",
            "--out is empty, which would be this folder; is a variable not set?",
        ),
        ("pretrain tiny --lr inf", "lr is inf; it must be above 0, and finite"),
        ("pretrain tiny --threads 100000", "threads is 100000; the most is 1024"),
        ("sft nano --seed -1", "seed is -1; it must lie in [0, 2^63)"),
        ("rl {tmp} --threads -1", "threads is -1; it must not be negative"),
        ("rl {tmp} --timeout-s nan", "timeout_s is nan s; it must be above 0"),
        ("rl {tmp} --url localhost:8000", "url is 'localhost:8000'; it must look like http://127.0.0.1:8000"),
        ("rl {tmp} --kl inf", "kl is inf; it must be finite"),
        ("sample {tmp} --temperature nan", "temperature is nan; it must be 0 or more, and finite"),
        ("sample {tmp} --seed -1", "seed is -1; it must lie in [0, 2^63)"),
        (
            "export {tmp} --out {tmp}/x --max-shard-gb inf",
            "max_shard_gb is inf; it must be above 0, and finite",
        ),
        ("import {tmp} --out {tmp}/x --max-shard-gb 0", "max_shard_gb is 0.0; it must be above 0"),
        ("quantize {tmp} --out {tmp}/x --max-shard-gb -1", "max_shard_gb is -1.0; it must be above 0"),
        ("quantize {tmp} --out {tmp}/x --last-mxfp8 7", "last_mxfp8 is '7'; write a fraction from 0 to 1"),
        ("quantize {tmp} --out {tmp}/x --last-mxfp8 1/0", "last_mxfp8 is '1/0'; write a fraction"),
        ("validate {tmp} --tp 0", "tp is 0; it must be at least 1"),
        ("inspect tinny", "unknown preset 'tinny'"),
        ("inspect tiny --recipe {tmp}/nothing.toml", "nothing.toml:2"),
    ],
)
def test_each_mistake_gives_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    (tmp_path / "typo.toml").write_text("[optimiser]\nlrr = 1\n")
    (tmp_path / "format.toml").write_text('[[rule]]\nmodules = "**"\nall = "nvfp5"\n')
    (tmp_path / "nothing.toml").write_text('name = "x"\n[[rule]]\nmodules = "absent.*"\nall = "mxfp8"\n')
    (tmp_path / "served").mkdir()
    (tmp_path / "served/config.json").write_text('{"quantization_config": {}}')
    (tmp_path / "rewarded").mkdir()
    (tmp_path / "rewarded/config.toml").write_text(dump_run(PretrainConfig(), "rl"))
    assert message in fails(capsys, words.format(tmp=tmp_path))


def test_a_wrong_recipe_or_vocabulary_stops_before_the_run_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from micro import make_data

    data = make_data(tmp_path)
    run = f"pretrain tiny --data {data} --out {tmp_path}/run"
    assert "did you mean 'inkling'" in fails(capsys, f"{run} --recipe inklin")
    assert "vocabulary of" in fails(capsys, f"{run} --vocab-size 100")
    assert not (tmp_path / "run").exists()
    assert "shorten seq_len" in fails(capsys, f"{run} --sequence 100000")


def test_unknown_verbs_and_flags_have_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean pretrain?" in fails(capsys, "pretain", status=2)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["sample", "x", "--promt", "y"])
    assert stopped.value.code == 2
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (NybbleError("two\nlines"), 1, "error: two lines\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            1,
            "error: runs/x: No space left on device\n",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            1,
            f"error: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; {LESS_MEMORY}\n",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            1,
            f"error: out of memory: DefaultCPUAllocator: can't allocate memory; {LESS_MEMORY}\n",
        ),
        (MemoryError(), 1, f"error: out of memory: MemoryError; {LESS_MEMORY}\n"),
    ],
)
def test_errors_of_a_verb_become_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    line: str,
) -> None:
    def verb(_words: list[str]) -> int:
        raise error

    monkeypatch.setattr("nybble.commands.recipes.main", verb)
    assert cli.main(["recipes"]) == status
    assert capsys.readouterr().err == line


def test_a_bug_and_debug_keep_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(_words: list[str]) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr("nybble.commands.recipes.main", bug)
    with pytest.raises(TypeError):
        cli.main(["recipes"])
    monkeypatch.undo()
    with pytest.raises(NybbleError):
        cli.main(["recipes", "absent", "--debug"])


def test_help_imports_neither_torch_nor_transformers_and_lists_every_verb() -> None:
    code = (
        "import sys, json; from nybble.cli import main; status = main(['--help']);"
        "print(json.dumps([status, sorted({'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    *text, last = done.stdout.splitlines()
    assert json.loads(last) == [0, []]
    for verb in cli.VERBS:
        assert any(line.split()[:1] == [verb] for line in text)
    assert done.stderr == ""


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([verb, "--help"])
        assert stopped.value.code == 0
        assert f"usage: nybble {verb}" in capsys.readouterr().out


def test_recipes_and_inspect_show_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert {"bf16", "mxfp8", "inkling", "mxfp4", "fp8"} <= {line.split()[0] for line in listed.splitlines()}
    assert cli.main(["recipes", "inkling"]) == 0
    assert 'format = "nvfp4"' in capsys.readouterr().out
    assert cli.main(["inspect", "tiny", "--recipe", "mxfp8"]) == 0
    shown = capsys.readouterr().out
    assert "mlp.experts" in shown
    assert "mxfp8" in shown


@pytest.mark.parametrize("words", [["tinny"], ["tiny", "--lr", "abc"]])
def test_of_several_ranks_the_first_says_what_is_wrong_with_the_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Another one says it where the first has not come that far when its patience ends."""
    said_before = []
    monkeypatch.setattr(together.time, "sleep", lambda _: said_before.append(capsys.readouterr().err))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, pauses in ("0", []), ("1", [""]):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with contextlib.suppress(SystemExit):
            assert cli.main(["pretrain", *words]) == 1
        assert said_before == pauses
        assert words[-1] in capsys.readouterr().err


def test_a_rank_that_leaves_the_word_to_another_stays_until_it_has_spoken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun ends all ranks as soon as one has ended."""
    paused: list[float] = []
    monkeypatch.setattr(together.time, "sleep", paused.append)
    assert together.another_says(together.OtherRankError("rank 1: full"))
    assert paused == [together.PATIENCE_S]


def test_a_terminal_without_the_letters_of_a_name_gets_them_escaped(tmp_path: Path) -> None:
    code = "import sys; from nybble.cli import main; sys.exit(main(['validate', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ünï-\udcff")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert r"\xfcn\xef-\udcff: no such folder" in done.stderr
