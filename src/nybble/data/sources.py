"""Text that users bring: .txt, .md, .jsonl (each also .gz) and .parquet files, read one document at a time.

Nothing here holds more than one document, one line or one Parquet batch in memory. Every complaint names the
file, the line (or row) and the fix.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from nybble.errors import DataError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (".txt", ".txt.gz", ".md", ".md.gz", ".jsonl", ".jsonl.gz", ".parquet")
# A longer text file becomes several documents, cut at a paragraph, so that a 100 GB file still streams.
PIECE_CHARACTERS = 1 << 22
# No line of JSONL is that long unless the file is not JSONL; reading on would fill the memory.
LINE_LIMIT_BYTES = 1 << 28
PARQUET_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus."""

    text: str
    split: str | None = None
    """"train" or "val" where the corpus itself says so; None leaves it to the hash of the text."""
    source_bytes: int = 0
    """Bytes of the source that this document used up, for progress bars."""


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Documents of files, in the order given; the files of a folder in the order of their paths."""

    files: tuple[Path, ...]
    field: str = "text"
    """JSONL field or Parquet column that holds the text."""

    @property
    def name(self) -> str:
        """What the source is called in summaries."""
        return ", ".join(str(file) for file in self.files[:3]) + (", ..." if len(self.files) > 3 else "")

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield every document; a DataError names the file and line of the first bad one."""
        for file in self.files:
            kind = _kind(file)
            try:
                if kind == ".parquet":
                    yield from _read_parquet(file, self.field)
                elif kind == ".jsonl":
                    yield from _read_jsonl(file, self.field)
                else:
                    yield from _read_text(file)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(
                    f"{file} is not a whole gzip file ({error}): fetch or compress it again"
                ) from error
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror or error}") from error

    def fingerprint(self) -> str:
        """SHA-256 of the bytes of all files, so that a second run knows whether the text has changed."""
        digest = hashlib.sha256()
        for file in self.files:
            try:
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        return digest.hexdigest()


def find_files(paths: tuple[str, ...] | list[str], field: str = "text") -> FileSource:
    """Resolve files and folders to a FileSource; folders are searched in depth, hidden files are left out."""
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found = [
                file
                for file in sorted(path.rglob("*"))
                if file.is_file()
                and _kind(file)
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            ]
            if not found:
                raise DataError(f"folder {path} holds no file that ends in {', '.join(SUFFIXES)}")
            files += found
        elif path.is_file():
            if not _kind(path):
                raise DataError(
                    f"{path}: cannot tell its kind; rename it to end in one of {', '.join(SUFFIXES)}"
                )
            files.append(path)
        else:
            raise DataError(f"{path} is no file or folder: give one, or the name of a built-in corpus")
    return FileSource(files=tuple(files), field=field)


def _kind(file: Path) -> str | None:
    name = file.name.lower().removesuffix(".gz")
    zipped = name != file.name.lower()
    for kind in (*TEXT_SUFFIXES, ".jsonl", ".parquet"):
        if name.endswith(kind):
            return None if zipped and kind == ".parquet" else kind
    return None


def _open_bytes(file: Path) -> BinaryIO:
    if file.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(file, "rb"))
    return file.open("rb")


def _read_text(file: Path) -> Iterator[Document]:
    """A file is one document, in pieces if it is very long; newlines become \\n, a byte order mark goes."""
    opener: Any = gzip.open if file.name.lower().endswith(".gz") else open
    carried = ""
    weight = file.stat().st_size
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline=None) as stream:
            while chunk := stream.read(PIECE_CHARACTERS):
                carried += chunk
                if len(carried) > PIECE_CHARACTERS:
                    cut = _cut(carried)
                    share = min(len(carried[:cut].encode()), weight)
                    yield Document(carried[:cut], source_bytes=share)
                    weight -= share
                    carried = carried[cut:]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}:{_undecodable_line(file)} holds bytes that are not UTF-8 ({error.reason}): "
            "convert the file"
        ) from error
    if carried:
        yield Document(carried, source_bytes=weight)


def _cut(text: str) -> int:
    """Where to end a piece: after the last paragraph, line or word of its second half, else at its end."""
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, len(text) // 2)
        if at >= 0:
            return at + len(mark)
    return len(text)


def _undecodable_line(file: Path) -> int:
    number = 0
    with _open_bytes(file) as stream:
        for number, line in enumerate(stream, start=1):  # noqa: B007 (the last number is the answer)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                break
    return number


def _read_jsonl(file: Path, field: str) -> Iterator[Document]:
    size = file.stat().st_size
    position = 0
    zipped = file.name.lower().endswith(".gz")
    with file.open("rb") as raw, gzip.GzipFile(fileobj=raw) if zipped else raw as stream:
        number = 0
        while line := stream.readline(LINE_LIMIT_BYTES):
            number += 1
            place = f"{file}:{number}"
            if len(line) == LINE_LIMIT_BYTES:
                raise DataError(f"{place} is longer than {LINE_LIMIT_BYTES >> 20} MiB: is this file JSONL?")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            before, position = position, min(raw.tell(), size) if zipped else position + len(line)
            yield Document(_parse_line(line, field, place), source_bytes=position - before)


def _parse_line(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} holds bytes that are not UTF-8 ({error.reason}): convert the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON ({error}): mend or remove that line") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} is not a JSON object: each line must be one, with the field {field!r}")
    if field not in record:
        names = ", ".join(repr(str(name)[:40]) for name in list(record)[:8]) or "none"
        raise DataError(f"{place} has no field {field!r} (it has {names}): name its own with --text-field")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} is {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: field {field!r} holds half a surrogate pair, which is no text") from error
    return text


def _read_parquet(file: Path, column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise DataError(
                    f"{file} has no column {column!r} (it has {', '.join(map(repr, names[:8]))}): "
                    "name the right one with --text-field"
                )
            kind = table.schema_arrow.field(column).type
            value_type = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(value_type) or pyarrow.types.is_large_string(value_type)):
                raise DataError(f"{file}: column {column!r} is {kind}, not a string")
            weight = file.stat().st_size // max(1, table.metadata.num_rows)
            row = 0
            for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[column]):
                try:
                    texts = batch.column(0).to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{file}: column {column!r} holds bytes that are not UTF-8 "
                        f"in rows {row} to {row + len(batch) - 1}"
                    ) from error
                row += len(batch)
                for text in texts:
                    yield Document(text or "", source_bytes=weight)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file} is not a whole Parquet file ({reason}): fetch or write it again") from error
