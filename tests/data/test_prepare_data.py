"""`prepare` gives the same folder every time, whole or not at all, and destroys nothing it did not make."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

from nybble.data import Dataset, PrepareConfig, ShardWriter, prepare
from nybble.data.unigram import cross_entropy, entropy
from nybble.errors import DataError


def config(source: Path, out: Path, **options: Any) -> PrepareConfig:
    return PrepareConfig(source=(str(source),), out=out, **{"vocab_size": 300, "quiet": True, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_twice_gives_the_same_bytes(text_folder: Path, tmp_path: Path) -> None:
    first = contents(prepare(config(text_folder, tmp_path / "a")))
    second = contents(prepare(config(text_folder, tmp_path / "b")))
    assert first == second
    assert "tokenizer/tokenizer.json" in first


def test_counts_and_entropies_are_those_of_the_shards(dataset: Dataset) -> None:
    counts = {}
    for name, split in dataset.splits.items():
        tokens = dataset.shards(name).read(0, split.tokens)
        counts[name] = np.bincount(tokens, minlength=400)
        assert counts[name][0] == split.documents
        p = counts[name][counts[name] > 0] / split.tokens
        assert split.unigram_entropy == pytest.approx(-(p * np.log(p)).sum())
    smoothed = (counts["train"] + 1) / (counts["train"] + 1).sum()
    expected = -(counts["val"] / counts["val"].sum() * np.log(smoothed)).sum()
    assert dataset.unigram_loss == pytest.approx(expected)
    assert dataset.unigram_loss > dataset.splits["val"].unigram_entropy
    assert len(dataset.splits["train"].shards) > 1


def test_entropy_of_known_distributions() -> None:
    assert entropy(np.array([5, 5, 5, 5, 0])) == pytest.approx(math.log(4))
    assert entropy(np.array([7, 0])) == pytest.approx(0)
    assert cross_entropy(np.array([0, 3]), np.array([6, 0])) == pytest.approx(math.log(8))


def test_hash_split_ignores_order_and_duplicates(text_folder: Path, tmp_path: Path) -> None:
    texts = [file.read_text() for file in sorted(text_folder.iterdir())]
    held_out = []
    for name, ordered in (("a", texts), ("b", texts[::-1] + texts[:50])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in ordered)
        )
        dataset = Dataset.open(prepare(config(tmp_path / f"{name}.jsonl", tmp_path / name, val_fraction=0.1)))
        tokens = dataset.shards("val").read(0, dataset.splits["val"].tokens)
        held_out.append(set(dataset.tokenizer.decode(tokens.tolist()).split("<|endoftext|>")))
    assert held_out[0] == held_out[1]
    assert 15 < len(held_out[0]) < 50


def test_a_single_text_has_its_tail_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {n} of the book\n" for n in range(1000))
    (tmp_path / "book.txt").write_text(text)
    dataset = Dataset.open(prepare(config(tmp_path / "book.txt", tmp_path / "out", val_fraction=0.1)))
    parts = [
        dataset.tokenizer.decode(dataset.shards(name).read(0, dataset.splits[name].tokens - 1).tolist())
        for name in ("train", "val")
    ]
    assert "".join(parts) == text
    assert parts[1].startswith("line 9")
    assert parts[0].endswith("\n")
    assert dataset.config["held_out_by"] == "tail"


def test_empty_documents_are_left_out_and_no_text_is_an_error(tmp_path: Path) -> None:
    texts = ["", " \n", *(f"text {n}" for n in range(200)), ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset = Dataset.open(prepare(config(tmp_path / "a.jsonl", tmp_path / "out")))
    assert sum(split.documents for split in dataset.splits.values()) == 200
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    for fraction in (0.02, 0.0):
        with pytest.raises(DataError, match=r"b\.jsonl (holds|leaves) no text"):
            prepare(config(tmp_path / "b.jsonl", tmp_path / "none", val_fraction=fraction))
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(DataError, match=r"c\.txt leaves no text"):
        prepare(config(tmp_path / "c.txt", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_without_held_out_text(text_folder: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(prepare(config(text_folder, tmp_path / "out", val_fraction=0)))
    assert list(dataset.splits) == ["train"]
    assert dataset.unigram_loss is None


def test_a_tokeniser_is_brought_along(text_folder: Path, dataset: Dataset, tmp_path: Path) -> None:
    made = Dataset.open(prepare(config(text_folder, tmp_path / "out", tokenizer=dataset.tokenizer_dir)))
    assert (made.vocab_size, made.tokenizer_sha256) == (400, dataset.tokenizer_sha256)
    again = prepare(config(text_folder, tmp_path / "out", tokenizer=dataset.folder))
    assert Dataset.open(again).sha256 == made.sha256


def test_the_tokeniser_never_sees_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("abab " * 900 + "zqzq " * 100)
    dataset = Dataset.open(prepare(config(tmp_path / "book.txt", tmp_path / "out", val_fraction=0.1)))
    assert len(dataset.tokenizer.encode(" abab")) == 1
    assert len(dataset.tokenizer.encode(" zqzq")) == 5


def test_a_second_run_does_nothing_and_other_options_are_refused(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prepare(config(text_folder, tmp_path / "out", quiet=False))
    captured = capsys.readouterr()
    assert "vocabulary 300" in captured.out
    assert "unigram" in captured.out
    assert captured.err == ""  # no bar where stderr is not a terminal
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    prepare(config(text_folder, out, quiet=False))
    assert "nothing to do" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    with pytest.raises(DataError, match=r"was prepared from vocab_size 300, not 280: .*--overwrite"):
        prepare(config(text_folder, out, vocab_size=280))
    (tmp_path / "more.txt").write_text("another text")
    with pytest.raises(DataError, match="was prepared from other text"):
        prepare(config(tmp_path / "more.txt", out))
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    prepare(config(text_folder, out, vocab_size=280, overwrite=True))
    assert Dataset.open(out).vocab_size == 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more.txt", "out"]


def test_a_damaged_folder_is_not_called_finished(text_folder: Path, tmp_path: Path) -> None:
    out = prepare(config(text_folder, tmp_path / "out"))
    shard = out / "val-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"val-00000\.bin is truncated.*--overwrite"):
        prepare(config(text_folder, out))
    prepare(config(text_folder, out, overwrite=True))
    Dataset.open(out).verify()


def test_a_folder_with_other_things_is_never_replaced(text_folder: Path, tmp_path: Path) -> None:
    out = prepare(config(text_folder, tmp_path / "out"))
    (out / "notes.md").write_text("mine")
    for folder in (out, text_folder):
        with pytest.raises(DataError, match="not a folder of prepared data alone"):
            prepare(config(text_folder, folder, overwrite=True))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="not a folder"):
        prepare(config(text_folder, tmp_path / "file", overwrite=True))
    assert (tmp_path / "file").read_text() == (out / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "cannot write .*out: No space left on device; free",
        ),
        (KeyboardInterrupt("stop"), "stop"),
        (RuntimeError("boom"), "boom"),
    ],
)
@pytest.mark.parametrize("had_one", [False, True])
def test_a_run_that_fails_midway_leaves_things_as_they_were(
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    expected: str,
    had_one: bool,
) -> None:
    out = tmp_path / "out"
    if had_one:
        prepare(config(text_folder, out))
    before = contents(tmp_path)
    written = 0
    write = ShardWriter.write

    def failing(self: ShardWriter, tokens: np.ndarray) -> None:
        nonlocal written
        written += 1
        if written == 3:
            raise failure
        write(self, tokens)

    monkeypatch.setattr(ShardWriter, "write", failing)
    kind = DataError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(kind, match=expected):
        prepare(config(text_folder, out, shard_tokens=1000, overwrite=True))
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if had_one else [])


def test_a_killed_run_leaves_no_folder_and_the_next_run_cleans_up(text_folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from nybble.data import PrepareConfig, ShardWriter, prepare\n"
        "ShardWriter.close = lambda self: time.sleep(60)\n"
        "prepare(PrepareConfig(source=(sys.argv[1],), out=pathlib.Path(sys.argv[2]), vocab_size=300))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(text_folder), str(tmp_path / "out")])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/*.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".out.partial-")
    prepare(config(text_folder, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unwritable_place_is_named(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/out"):
        prepare(config(text_folder, tmp_path / "file" / "out"))


def test_bad_options_are_named(text_folder: Path, tmp_path: Path) -> None:
    for options, complaint in (
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"val_fraction": float("nan")}, "val_fraction is nan"),
        ({"vocab_size": 10}, "vocab_size is 10"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"eot_token": "</s>"}, "eot_token"),
        ({"source": ()}, "source is empty"),
    ):
        with pytest.raises(DataError, match=complaint):
            PrepareConfig(**options)
    with pytest.raises(DataError, match=r"source 'stou' is neither .* built-in corpus \(sotu, "):
        prepare(PrepareConfig(source=("stou",)))
    with pytest.raises(DataError, match="absent"):
        prepare(config(text_folder, tmp_path / "out", tokenizer=tmp_path / "absent"))


def test_command_line_reads_the_config() -> None:
    parsed = tyro.cli(PrepareConfig, args=["a.txt", "b", "--vocab-size", "512", "--out", "x"])
    assert parsed == PrepareConfig(source=("a.txt", "b"), vocab_size=512, out=Path("x"))
    assert tyro.cli(PrepareConfig, args=[]).source == ("sotu",)


def test_default_folder_is_named_after_the_source(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.jsonl.gz").symlink_to(text_folder / "0000.txt")
    (tmp_path / "book.md").write_text("a text of a few words " * 50)
    assert prepare(PrepareConfig(source=("book.md",), vocab_size=300, quiet=True)) == Path("data/book")
    assert (tmp_path / "data" / "book" / "dataset.json").is_file()


@pytest.mark.slow
def test_sotu_prepares_whole(tmp_path: Path) -> None:
    dataset = Dataset.open(prepare(PrepareConfig(out=tmp_path / "sotu", quiet=True)))
    assert dataset.vocab_size == 4096
    assert dataset.config["held_out_by"] == "corpus"
    assert dataset.splits["train"].documents > 200
    assert dataset.splits["val"].documents > 15
    for split in dataset.splits.values():
        assert 3 < split.bytes / split.tokens < 5
        assert 6 < split.unigram_entropy < 7
    dataset.verify()


def test_an_old_folder_comes_back_if_the_new_one_cannot_take_its_name(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = prepare(config(text_folder, tmp_path / "out"))
    before = contents(tmp_path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if Path(target) == out and not self.name.endswith("-old"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError, match=r"cannot write .*out: Permission denied"):
        prepare(config(text_folder, out, vocab_size=290, overwrite=True))
    assert contents(tmp_path) == before
