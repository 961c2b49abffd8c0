"""Which text is held out for validation, decided by the text alone."""

import hashlib
from collections.abc import Iterator

from nybble.data.corpora import Corpus
from nybble.data.sources import Document, FileSource
from nybble.errors import DataError


class Splitter:
    """Gives every document of a source its split, in the same way at every pass.

    `how` is "corpus" (the corpus says), "hash" (a document is held out if the hash of its text falls below
    `val_fraction`: equal texts land on the same side, and added files move no other), "tail" (too few
    documents for that: the last part of each document is held out) or "none" (`val_fraction` is 0).
    """

    def __init__(self, source: Corpus | FileSource, val_fraction: float) -> None:
        self.source = source
        self.val_fraction = val_fraction
        if isinstance(source, Corpus):
            self.how = "corpus"
        elif val_fraction == 0:
            self.how = "none"
        else:
            self.how = self._hash_or_tail()

    def documents(self) -> Iterator[Document]:
        """Documents with `split` set; empty ones come too, with split "train"."""
        for document in self.source.documents():
            if document.split is not None:
                yield document
            elif self.how == "tail" and document.text.strip():
                yield from self._cut(document)
            else:
                held_out = self.how == "hash" and document.text.strip() and self._is_held_out(document.text)
                yield Document(document.text, "val" if held_out else "train", document.source_bytes)

    def _hash_or_tail(self) -> str:
        """Read until both sides have a document; a large corpus shows that after a few."""
        sides = set()
        for document in self.source.documents():
            if document.text.strip():
                sides.add(self._is_held_out(document.text))
                if len(sides) == 2:
                    return "hash"
        if not sides:
            raise DataError(f"{self.source.name} holds no text: every document is empty")
        return "tail"

    def _is_held_out(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.val_fraction * 2**64

    def _cut(self, document: Document) -> Iterator[Document]:
        """Cut before the last `val_fraction` of the text, at a line or word that begins soon after."""
        text = document.text
        cut = int(len(text) * (1 - self.val_fraction))
        soon = (cut + len(text)) // 2
        for mark in ("\n", " "):
            found = text.find(mark, max(0, cut - 1), soon)
            if found >= 0:
                cut = found + 1
                break
        yield Document(text[:cut], "train", document.source_bytes)
        yield Document(text[cut:], "val")
