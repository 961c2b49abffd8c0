"""Shards give their tokens back, and no damaged or foreign one is ever read as tokens."""

import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nybble.data import Dataset, Loader, Shard, Shards, ShardWriter
from nybble.data.shards import HEADER_BYTES, token_dtype
from nybble.errors import DataError

SHA = "ab" * 32


def write(file: Path, tokens: np.ndarray, vocab_size: int = 1000, sha: str = SHA) -> Path:
    with ShardWriter(file, vocab_size=vocab_size, eot_id=0, tokenizer_sha256=sha) as writer:
        for piece in np.array_split(tokens, 3):
            writer.write(piece)
    return file


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1000, 2), (65536, 2), (65537, 4), (300_000, 4)])
def test_tokens_come_back_in_the_smallest_type(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokens = np.array([0, 1, vocab_size - 1, 7, vocab_size // 2])
    shard = Shard(write(tmp_path / "a.bin", tokens, vocab_size))
    assert token_dtype(vocab_size).itemsize == itemsize
    assert shard.file.stat().st_size == HEADER_BYTES + len(tokens) * itemsize
    assert shard.read(0, 5).tolist() == tokens.tolist()
    assert shard.header.tokenizer_sha256 == SHA


def test_several_shards_read_as_one(tmp_path: Path) -> None:
    tokens = np.arange(100)
    files = [write(tmp_path / f"{n}.bin", piece) for n, piece in enumerate(np.split(tokens, [1, 40, 41]))]
    shards = Shards(files)
    assert len(shards) == 100
    for start in range(101):
        for stop in range(start, 101):
            assert np.array_equal(shards.read(start, stop), tokens[start:stop])
    with pytest.raises(IndexError):
        shards.read(50, 101)


def test_a_token_outside_the_vocabulary_is_never_written(tmp_path: Path) -> None:
    for bad in (1000, -1):
        with pytest.raises(DataError, match="not within the vocabulary of 1000"):
            write(tmp_path / "a.bin", np.array([1, bad, 2]))
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_shard_never_has_its_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.bin", vocab_size=1000, eot_id=0, tokenizer_sha256=SHA)
    writer.write(np.arange(10))
    assert not (tmp_path / "a.bin").exists()
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def _edit(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:HEADER_BYTES], "truncated"),
        (lambda data: data[:50], "truncated within its header"),
        (lambda data: data[:0], "wrong magic"),
        (lambda data: data + b"x", "too long"),
        (_edit(0, b"PK\x03\x04"), "wrong magic"),
        (_edit(8, b"\x02"), "shard version 2"),
        (_edit(16, b"\x01"), "corrupt header"),
        (_edit(30, b"\x01"), "corrupt header"),
        (_edit(HEADER_BYTES + 7, b"\x01"), "checksum of its tokens differs"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], complaint: str) -> None:
    file = write(tmp_path / "a.bin", np.arange(500))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=complaint) as caught:
        Shard(file)
    assert str(file) in str(caught.value)
    assert "nybble prepare" in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "flipped.bin"
    content = bytearray(write(file, np.arange(50)).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(content)
    with pytest.raises(DataError):
        Shard(file)


def test_a_large_shard_is_opened_unverified_but_its_tokens_stay_in_the_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", np.arange(500))
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 2 * 300 + 1] = 0xFF
    file.write_bytes(content)
    shard = Shard(file, verify=False)
    assert shard.read(0, 300).tolist() == list(range(300))
    with pytest.raises(DataError, match=r"a\.bin is corrupt: token 65324 at 300 is not within .* 1000"):
        shard.read(250, 350)
    with pytest.raises(DataError, match="checksum"):
        shard.verify()


def test_shards_of_two_tokenisers_do_not_mix(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.bin", np.arange(9)), write(tmp_path / "b.bin", np.arange(9), sha="cd" * 32)]
    with pytest.raises(DataError, match=r"b\.bin was made with another tokenizer"):
        Shards(files)


@pytest.fixture
def copied(dataset_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset_dir, tmp_path / "copy"))


def test_the_identity_of_a_dataset_is_its_content(copied: Path, dataset: Dataset) -> None:
    assert Dataset.open(copied).sha256 == dataset.sha256
    dataset.verify()


def test_a_shard_that_the_dataset_does_not_list_is_refused(copied: Path) -> None:
    header = Shard(copied / "val-00000.bin").header
    write(copied / "val-00000.bin", np.arange(9), header.vocab_size, header.tokenizer_sha256)
    with pytest.raises(DataError, match=r"val-00000\.bin is not the shard that dataset\.json lists"):
        Loader(copied, "val", 1, 8)
    write(copied / "val-00000.bin", np.arange(9), 1000)
    with pytest.raises(DataError, match=r"val-00000\.bin was made with another tokenizer"):
        Loader(copied, "val", 1, 8)
    (copied / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin cannot be read"):
        Loader(copied, "train", 1, 8)


def test_a_changed_tokeniser_is_refused(copied: Path) -> None:
    file = copied / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(DataError, match="not the tokenizer that the shards were made with"):
        Dataset.open(copied)
    file.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        Dataset.open(copied)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 9'),
        ("nybble-dataset", "other"),
        ('"splits"', '"parts"'),
        ('"eot_id": 0', '"eot_id": null'),
        ('"documents"', '"papers"'),
        ("{", ""),
    ],
)
def test_a_malformed_dataset_file_is_named(copied: Path, old: str, new: str) -> None:
    file = copied / "dataset.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=r"dataset\.json"):
        Dataset.open(copied)


def test_a_model_with_too_small_a_vocabulary_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    dataset.check_model_vocab(400)
    dataset.check_model_vocab(512)
    with pytest.raises(DataError, match="vocabulary of 400 tokens, the model only 399"):
        dataset.check_model_vocab(399)
    with pytest.raises(DataError, match="no split 'test': it has train, val"):
        dataset.shards("test")
    with pytest.raises(DataError, match="not a prepared dataset"):
        Dataset.open(tmp_path)
