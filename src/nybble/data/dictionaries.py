"""Dictionaries that Debian packages: short definitions in plain English, many times the messages."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from nybble.data.sources import Document
from nybble.errors import DataError

WORDNET_FOLDER = Path("/usr/share/wordnet")
GCIDE_FOLDER = Path("/usr/share/dictd")
PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
HELD_OUT = 0.02
"""Share of the entries that is held out, by the hash of their first line."""


def read_wordnet(folder: Path | None) -> Iterator[Document]:
    """One document a set of synonyms: `words (noun): definition; "example"`, in the order of the files.

    `folder` holds data.noun and its like (wndb(5WN)); without one, WNSEARCHDIR or the folder of Debian's
    wordnet-base.
    """
    folder = folder or Path(os.environ.get("WNSEARCHDIR", WORDNET_FOLDER))
    for part, kind in PARTS.items():
        file = folder / f"data.{part}"
        if not file.is_file():
            raise DataError(
                f"corpus wordnet: {file} is not there: install Debian's wordnet-base, or name the folder "
                "that holds data.noun as wordnet:FOLDER"
            )
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.startswith("  "):  # those are the licence
                    text = _synset(line, kind, f"{file}:{number}")
                    yield Document(text, split=_split(text), source_bytes=len(line.encode()))


def _synset(line: str, kind: str, place: str) -> str:
    """`offset file type count word id word id ... | gloss`, the count in hexadecimal."""
    data, bar, gloss = line.partition("|")
    fields = data.split()
    try:
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    except (IndexError, ValueError):
        words = []
    if not words or not bar:
        raise DataError(f"{place} is not a line of a WordNet data file: install wordnet-base again")
    names = (word.removesuffix("(a)").removesuffix("(p)").removesuffix("(ip)") for word in words)
    return f"{', '.join(names).replace('_', ' ')} ({kind}): {gloss.strip()}"


def read_gcide(folder: Path | None) -> Iterator[Document]:
    """One document an entry, as printed: the headword at the margin, its senses indented below.

    `folder` holds gcide.dict.dz; without one, that of Debian's dict-gcide.
    """
    file = (folder or GCIDE_FOLDER) / "gcide.dict.dz"
    if not file.is_file():
        raise DataError(
            f"corpus gcide: {file} is not there: install Debian's dict-gcide, or name the folder that holds "
            "gcide.dict.dz as gcide:FOLDER"
        )
    entry: list[str] = []
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                if entry and line[:1] not in (" ", "\n"):
                    yield from _entry(entry)
                    entry = []
                entry.append(line)
            yield from _entry(entry)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is not a whole gzip file ({error}): install dict-gcide again") from error


def _entry(lines: list[str]) -> Iterator[Document]:
    """What is about the database itself, and lines without senses below them, are left out."""
    head = lines[0].strip()
    if head and not head.startswith("00-database") and any(line.startswith(" ") for line in lines):
        text = "".join(lines).strip("\n") + "\n"
        yield Document(text, split=_split(head), source_bytes=len("".join(lines).encode()))


def _split(head: str) -> str:
    digest = hashlib.blake2b(head.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < HELD_OUT * 2**64 else "train"
