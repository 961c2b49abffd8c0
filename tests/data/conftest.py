"""Made-up texts, and a small dataset of them that is prepared once a session."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nybble.data import Dataset, PrepareConfig, prepare

WORDS = ["four", "bits", "carry", "a", "number", "shares", "scale", "the", "so", "sixteen", "truth", "blocks"]
WORDS += ["états", "naïve", "数", "字", "Ω", "€5", "don't", "they've", "1900", "3.14", ":)", "\U0001f600"]


def _make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 5 to 80 words."""
    draw = random.Random(seed)
    return [
        f"{index} " + " ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 80)))
        for index in range(count)
    ]


@pytest.fixture(scope="session")
def make_texts() -> Callable[..., list[str]]:
    """`make_texts(count, seed)`: the same texts for the same seed."""
    return _make_texts


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One .txt a document."""
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(_make_texts(300)):
        (folder / f"{index:04d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset_dir(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with several shards in split train."""
    out = tmp_path_factory.mktemp("prepared") / "texts"
    return prepare(
        PrepareConfig(
            source=(str(text_folder),),
            out=out,
            vocab_size=400,
            val_fraction=0.1,
            shard_tokens=3000,
            quiet=True,
        )
    )


@pytest.fixture(scope="session")
def dataset(dataset_dir: Path) -> Dataset:
    """The same, opened."""
    return Dataset.open(dataset_dir)
