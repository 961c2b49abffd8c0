"""Token shards: one file of token ids behind a header of 128 bytes, read by memory map.

Layout, little-endian:

    offset  size  field
    0       8     magic "NYBSHARD"
    8       4     version, 1
    12      4     bytes a token: 2 (uint16, vocabularies up to 65536) or 4 (uint32)
    16      8     number of tokens
    24      4     vocabulary size; every token is smaller
    28      4     id of the token that ends a document
    32      32    SHA-256 of the tokeniser's tokenizer.json
    64      32    SHA-256 of the body
    96      28    zeros
    124     4     CRC-32 of bytes 0 to 123
    128           body: the tokens

Documents follow each other, each ended by the end token. A shard may end within a document; the next one
goes on.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from nybble.errors import DataError

MAGIC = b"NYBSHARD"
VERSION = 1
HEADER_BYTES = 128
_FIELDS = struct.Struct("<8sIIQII32s32s28x")
_CRC = struct.Struct("<I")
# Up to this size the checksum is verified at every open (a tenth of a second); of larger ones by verify().
VERIFY_AT_OPEN_BYTES = 1 << 26
_REMAKE = "make the folder again with `nybble prepare --overwrite`"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Smallest of uint16 and uint32 that holds every token of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """What a shard says of itself."""

    tokens: int
    vocab_size: int
    eot_id: int
    tokenizer_sha256: str
    body_sha256: str

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the tokens on disk."""
        return token_dtype(self.vocab_size)

    def pack(self) -> bytes:
        """The 128 bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.dtype.itemsize,
            self.tokens,
            self.vocab_size,
            self.eot_id,
            bytes.fromhex(self.tokenizer_sha256),
            bytes.fromhex(self.body_sha256),
        )
        return fields + _CRC.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> "ShardHeader":
        """Read the 128 bytes; DataError names `file`."""
        if data[: len(MAGIC)] != MAGIC:
            raise DataError(f"{file} is not a token shard of Nybble (wrong magic bytes): {_REMAKE}")
        if len(data) < HEADER_BYTES:
            raise DataError(f"{file} is truncated within its header: {_REMAKE}")
        _, version, itemsize, tokens, vocab_size, eot_id, tokenizer, body = _FIELDS.unpack(
            data[: _FIELDS.size]
        )
        if version != VERSION:
            raise DataError(f"{file} has shard version {version}, this Nybble reads {VERSION}: {_REMAKE}")
        if _CRC.unpack(data[_FIELDS.size : HEADER_BYTES])[0] != zlib.crc32(data[: _FIELDS.size]):
            raise DataError(f"{file} has a corrupt header (checksum differs): {_REMAKE}")
        if itemsize != token_dtype(vocab_size).itemsize or tokens == 0 or eot_id >= vocab_size:
            raise DataError(f"{file} has a header that contradicts itself: {_REMAKE}")
        return cls(
            tokens=tokens,
            vocab_size=vocab_size,
            eot_id=eot_id,
            tokenizer_sha256=tokenizer.hex(),
            body_sha256=body.hex(),
        )


class ShardWriter:
    """Writes one shard under a temporary name; `close` completes the header and gives the file its name."""

    def __init__(self, file: Path, *, vocab_size: int, eot_id: int, tokenizer_sha256: str) -> None:
        self.file = file
        self.partial = file.with_name(file.name + ".partial")
        self.vocab_size = vocab_size
        self.eot_id = eot_id
        self.tokenizer_sha256 = tokenizer_sha256
        self.tokens = 0
        self._digest = hashlib.sha256()
        self._stream: BinaryIO = self.partial.open("wb")
        self._stream.write(bytes(HEADER_BYTES))

    def write(self, tokens: NDArray[np.integer]) -> None:
        """Append tokens [n], each in range(vocab_size)."""
        if tokens.size == 0:
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise DataError(f"{self.file}: a token is not within the vocabulary of {self.vocab_size}")
        body = tokens.astype(token_dtype(self.vocab_size)).tobytes()
        self._digest.update(body)
        self._stream.write(body)
        self.tokens += tokens.size

    def close(self) -> ShardHeader:
        """Finish the file, safe on disk, and return its header."""
        header = ShardHeader(
            tokens=self.tokens,
            vocab_size=self.vocab_size,
            eot_id=self.eot_id,
            tokenizer_sha256=self.tokenizer_sha256,
            body_sha256=self._digest.hexdigest(),
        )
        self._stream.seek(0)
        self._stream.write(header.pack())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self.partial, self.file)
        return header

    def abort(self) -> None:
        """Drop what was written."""
        # Closing flushes, which fails once more on a full disk: the first failure is the one to report.
        with suppress(OSError):
            self._stream.close()
        self.partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._stream.closed:
            self.close()


class Shard:
    """One shard, memory-mapped read-only."""

    def __init__(self, file: Path | str, verify: bool | None = None) -> None:
        """Open; check header and size. `verify` forces or skips the body's checksum (None: only if small)."""
        self.file = Path(file)
        try:
            with self.file.open("rb") as stream:
                self.header = ShardHeader.unpack(stream.read(HEADER_BYTES), self.file)
            size = self.file.stat().st_size
        except OSError as error:
            raise DataError(f"shard {self.file} cannot be read: {error.strerror or error}") from error
        expected = HEADER_BYTES + self.header.tokens * self.header.dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise DataError(f"{self.file} is {state}: {size} bytes, its header says {expected}; {_REMAKE}")
        self.body: NDArray[np.unsignedinteger] = np.memmap(
            self.file, dtype=self.header.dtype, mode="r", offset=HEADER_BYTES, shape=(self.header.tokens,)
        )
        if verify or (verify is None and size <= VERIFY_AT_OPEN_BYTES):
            self.verify()

    def __len__(self) -> int:
        return self.header.tokens

    def verify(self) -> None:
        """Raise DataError unless the body has its checksum and every token is within the vocabulary."""
        digest = hashlib.sha256()
        largest = 0
        for start in range(0, len(self), 1 << 24):
            piece = self.body[start : start + (1 << 24)]
            digest.update(piece.tobytes())
            largest = max(largest, int(piece.max()))
        if digest.hexdigest() != self.header.body_sha256:
            raise DataError(f"{self.file} is corrupt (the checksum of its tokens differs): {_REMAKE}")
        if largest >= self.header.vocab_size:
            raise DataError(
                f"{self.file} holds token {largest}, its vocabulary has {self.header.vocab_size}: {_REMAKE}"
            )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [stop - start] as int64."""
        tokens = self.body[start:stop].astype(np.int64)
        if tokens.size and int(tokens.max()) >= self.header.vocab_size:
            raise DataError(
                f"{self.file} is corrupt: token {int(tokens.max())} at {start + int(tokens.argmax())} is not "
                f"within its vocabulary of {self.header.vocab_size}; {_REMAKE}"
            )
        return tokens


class Shards:
    """Several shards as one long row of tokens."""

    def __init__(self, files: Sequence[Path | str], verify: bool | None = None) -> None:
        if not files:
            raise DataError("a split needs at least one shard")
        self.shards = [Shard(file, verify) for file in files]
        first = self.shards[0].header
        for shard in self.shards[1:]:
            mine = (shard.header.vocab_size, shard.header.eot_id, shard.header.tokenizer_sha256)
            if mine != (first.vocab_size, first.eot_id, first.tokenizer_sha256):
                raise DataError(
                    f"{shard.file} was made with another tokenizer than {self.shards[0].file}: {_REMAKE}"
                )
        self.vocab_size = first.vocab_size
        self.eot_id = first.eot_id
        self.ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [stop - start] as int64, across shard borders."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        parts: list[NDArray[np.int64]] = []
        index = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[index]) - len(self.shards[index])
            upto = min(stop, int(self.ends[index]))
            parts.append(self.shards[index].read(start - first, upto - first))
            start = upto
            index += 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
