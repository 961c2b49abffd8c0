"""Several sources in one dataset: each a domain with a weight, and a held-out split of its own."""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nybble.data.sources import Document
from nybble.data.split import Splitter
from nybble.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One source of a dataset."""

    name: str
    """Its held-out split is val-NAME; "" where the dataset has one domain, whose split is val."""
    splitter: Splitter
    weight: float = 1.0
    """How often an epoch sees each of its training documents; of a fraction, a part of them once more."""

    @property
    def val(self) -> str:
        """Name of its held-out split."""
        return f"val-{self.name}" if self.name else "val"

    @property
    def nbytes(self) -> int:
        """Bytes of source that `documents` goes through."""
        return math.ceil(self.weight) * self.splitter.source.nbytes

    def documents(self) -> Iterator[Document]:
        """Documents with the splits of the dataset, training ones as often as the weight says."""
        for turn in range(math.ceil(self.weight)):
            for document in self.splitter.documents():
                held_out = document.split == "val"
                if held_out and turn == 0:
                    yield Document(document.text, self.val, document.source_bytes)
                elif not held_out and self._takes(document.text, turn):
                    yield Document(document.text, "train", document.source_bytes)

    def _takes(self, text: str, turn: int) -> bool:
        share = self.weight - turn
        if share >= 1:
            return True
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"mixture").digest()
        return int.from_bytes(digest, "big") < share * 2**64


def domain_names(names: list[str]) -> list[str]:
    """Names that fit into file names, one each; DataError where two sources would share one."""
    clean = [re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "text" for name in names]
    double = next((name for name in clean if clean.count(name) > 1), None)
    if double:
        raise DataError(f"two sources would be the domain {double!r}: rename one, or put them in one folder")
    return clean
