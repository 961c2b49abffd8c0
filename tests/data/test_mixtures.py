"""Several sources in one dataset, and the dictionaries that Debian packages."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nybble.cli import main
from nybble.data import Dataset, Loader, PrepareConfig, prepare
from nybble.data.corpora import CORPORA, find_corpus
from nybble.errors import DataError

LICENCE = "  1 This software and database is being provided to you, the LICENSEE\n"
SYNSETS = {
    "noun": "00001930 03 n 01 physical_entity 0 000 | an entity that has physical existence  \n",
    "verb": '00001740 29 v 02 breathe 0 take_a_breath 0 000 | draw air; "I breathe"  \n',
    "adj": "00001740 00 a 01 able(p) 0 000 | having the means  \n",
    "adv": "00001740 02 r 01 a_cappella 0 000 | without instruments  \n",
}


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "dict"
    folder.mkdir()
    for part, line in SYNSETS.items():
        (folder / f"data.{part}").write_text(LICENCE + line)
    return folder


def test_wordnet_reads_words_kind_and_gloss_without_the_licence(wordnet: Path) -> None:
    corpus = find_corpus(f"wordnet:{wordnet}")
    assert corpus is not None
    assert [document.text for document in corpus.documents()] == [
        "physical entity (noun): an entity that has physical existence",
        'breathe, take a breath (verb): draw air; "I breathe"',
        "able (adjective): having the means",
        "a cappella (adverb): without instruments",
    ]


@pytest.mark.parametrize("line", ["no bar here\n", "00001740 03 n zz word 0 | gloss\n", "| gloss\n"])
def test_a_broken_wordnet_line_is_named(wordnet: Path, line: str) -> None:
    (wordnet / "data.verb").write_text(LICENCE + line)
    with pytest.raises(DataError, match=r"data\.verb:2 is not a line of a WordNet data file"):
        list(find_corpus(f"wordnet:{wordnet}").documents())  # type: ignore[union-attr]


def test_gcide_reads_entries_and_leaves_out_what_is_about_the_database(tmp_path: Path) -> None:
    entries = [
        "00-database-short\n   The dictionary\n\nA notice without senses.\n\n",
        'Abaca \\A*ba"ca\\, n.\n   A plant.\n\n   2. Its fiber.\n\n',
        "Aback\n   Backwards.\n",
    ]
    with gzip.open(tmp_path / "gcide.dict.dz", "wt") as file:
        file.write("".join(entries))
    texts = [d.text for d in find_corpus(f"gcide:{tmp_path}").documents()]  # type: ignore[union-attr]
    assert texts == [entries[1][:-1], entries[2]]


@pytest.mark.parametrize("name", ["wordnet", "gcide"])
def test_a_missing_dictionary_names_its_package(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"corpus {name}: .* is not there: install Debian's .*{name}:FOLDER"):
        prepare(PrepareConfig(source=(f"{name}:{tmp_path}",), out=tmp_path / "out", quiet=True))


def test_every_corpus_says_its_licence() -> None:
    assert all(corpus.licence and corpus.title for corpus in CORPORA.values())


@pytest.fixture
def mixed(text_folder: Path, make_texts, tmp_path: Path) -> Dataset:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"text": "entry {text}"}}\n' for text in make_texts(60, seed=7)))
    config = PrepareConfig(
        source=(str(text_folder), str(other)), weights=(1.0, 2.5), out=tmp_path / "mixed", vocab_size=400,
        val_fraction=0.2, quiet=True,
    )  # fmt: skip
    dataset = Dataset.open(prepare(config))
    prepare(config)  # the same again does nothing
    with pytest.raises(DataError, match="domains"):
        prepare(PrepareConfig(**{**vars(config), "weights": (1.0, 2.0)}))
    return dataset


def documents(dataset: Dataset, split: str) -> Counter[str]:
    shards = dataset.shards(split)
    tokens = shards.read(0, len(shards))
    parts = np.split(tokens, np.flatnonzero(tokens == dataset.eot_id) + 1)
    return Counter(dataset.tokenizer.decode(part[:-1].tolist()) for part in parts if len(part))


def test_weights_repeat_training_documents_and_hold_out_by_domain(mixed: Dataset) -> None:
    train = documents(mixed, "train")
    other = Counter(count for text, count in train.items() if text.startswith("entry"))
    plain = Counter(count for text, count in train.items() if not text.startswith("entry"))
    assert set(plain) == {1}
    assert set(other) == {2, 3}  # each twice, about half of them once more
    assert 0.25 < other[3] / sum(other.values()) < 0.75
    held_out = documents(mixed, "val")
    domains = [documents(mixed, name) for name in mixed.splits if name.startswith("val-")]
    assert len(domains) == 2
    assert held_out == domains[0] + domains[1]
    assert max(held_out.values()) == 1
    assert not set(held_out) & set(train)
    assert mixed.splits["val"].documents == sum(held_out.values())


def test_each_domain_loads_for_validation(mixed: Dataset) -> None:
    counts = [
        sum(int((batch["labels"] >= 0).sum()) for batch in Loader(mixed, name, 2, 16).eval_batches())
        for name in mixed.splits
        if name.startswith("val")
    ]
    assert counts[0] == sum(counts[1:]) + 1  # one token more is a label where the domains meet


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1.0,)}, "1 numbers for 2 sources"),
        ({"weights": (1.0, 0.0)}, "above 0"),
        (
            {"source": ("{tmp}/a.txt", "{tmp}/b/a.txt"), "weights": (1.0, 1.0)},
            "two sources would be",
        ),
    ],
)
def test_bad_mixtures_are_named(tmp_path: Path, options: dict[str, object], message: str) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b.txt", "b/a.txt"):
        (tmp_path / name).write_text("some words to hold " * 30)
    source = options.get("source", ("{tmp}/a.txt", "{tmp}/b.txt"))
    named = tuple(name.format(tmp=tmp_path) for name in source)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=message):
        prepare(PrepareConfig(**{**options, "source": named}, out=tmp_path / "out", quiet=True))  # type: ignore[arg-type]


def test_the_command_line_takes_corpora_files_and_weights(wordnet: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the words of a book, again and again\n" * 40)
    for part, line in SYNSETS.items():
        (wordnet / f"data.{part}").write_text("".join(line.replace(" 0 ", f"_{n} 0 ", 1) for n in range(120)))
    words = ["prepare", f"wordnet:{wordnet}", str(book), "--weights", "1", "0.5", "--vocab-size", "300"]
    assert main([*words, "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert set(Dataset.open(tmp_path / "out").splits) == {"train", "val", "val-wordnet", "val-book"}
