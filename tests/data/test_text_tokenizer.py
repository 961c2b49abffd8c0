"""A tokeniser gives every text back, is the same at every training, and loads in transformers as it is."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nybble.data import TextTokenizer, load_tokenizer, train_tokenizer
from nybble.errors import DataError

MakeTexts = Callable[..., list[str]]


@pytest.fixture(scope="module")
def tokenizer(make_texts: MakeTexts) -> TextTokenizer:
    return train_tokenizer(make_texts(200), vocab_size=400)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200) | st.sampled_from(["<|endoftext|>", "a<|pad|>b", "\r\n \x00\u200b", " "]))
def test_every_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair; sources.py refuses it
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_id not in ids
    assert tokenizer.pad_id not in ids
    assert np.array_equal(tokenizer.encode_batch([text, "other"])[0], ids)


def test_training_twice_gives_the_same_bytes(tokenizer: TextTokenizer, make_texts: MakeTexts) -> None:
    again = train_tokenizer(iter(make_texts(200)), vocab_size=400)
    assert again.json_bytes == tokenizer.json_bytes
    assert again.sha256 == tokenizer.sha256
    assert train_tokenizer(make_texts(200, seed=1), vocab_size=400).sha256 != tokenizer.sha256


def test_special_tokens_and_sizes(tokenizer: TextTokenizer) -> None:
    assert (tokenizer.eot_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, 400)
    assert train_tokenizer(["ab"], vocab_size=5000).vocab_size == 259  # one pair to merge
    for size in (257, -1, 1 << 40):
        with pytest.raises(DataError, match="vocab_size"):
            train_tokenizer(["ab"], vocab_size=size)


def test_transformers_loads_the_folder_without_a_warning(
    tokenizer: TextTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert "warn" not in capfd.readouterr().err.lower()
    text = "  états don't 数 :)\n\n1900"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (0, 1, 400)


def test_a_saved_folder_is_the_same_tokeniser(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    loaded.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert loaded.sha256 == load_tokenizer(tmp_path / "a" / "tokenizer.json").sha256 == tokenizer.sha256


def test_a_foreign_tokeniser_names_its_end_token(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    foreign = tokenizer.json_bytes.replace(b"<|endoftext|>", b"[END]").replace(b"<|pad|>", b"[FILL]")
    (tmp_path / "tokenizer.json").write_bytes(foreign)
    with pytest.raises(DataError, match=r"no token that ends a document.*--eot-token"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"has no token '\[STOP\]'"):
        load_tokenizer(tmp_path, "[STOP]")
    assert load_tokenizer(tmp_path, "[END]").eot_id == 0
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "[END]"}, "pad_token": "[FILL]"}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eot_id, loaded.pad_id) == (0, 1)
    config.write_text("[1]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is malformed"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', None])
def test_a_corrupt_tokeniser_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
