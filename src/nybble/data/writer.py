"""Writing a split: shards one after another, and the counts that describe them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nybble.data.dataset import ShardEntry, Split
from nybble.data.shards import ShardWriter
from nybble.data.tokenizer import TextTokenizer
from nybble.data.unigram import entropy


class SplitWriter:
    """Shards and counts of one split."""

    def __init__(self, folder: Path, split: str, tokenizer: TextTokenizer, shard_tokens: int) -> None:
        self.folder = folder
        self.split = split
        self.vocab_size = tokenizer.vocab_size
        self.eot_id = tokenizer.eot_id
        self.tokenizer_sha256 = tokenizer.sha256
        self.shard_tokens = shard_tokens
        self.counts: NDArray[np.int64] = np.zeros(self.vocab_size, dtype=np.int64)
        self.documents = 0
        self.bytes = 0
        self.entries: list[ShardEntry] = []
        self.writer: ShardWriter | None = None

    def add(self, texts: Sequence[str], documents: Sequence[NDArray[np.int64]]) -> None:
        """Append documents, given as texts and as tokens, each with its end token."""
        end = np.array([self.eot_id])
        tokens = np.concatenate([part for document in documents for part in (document, end)])
        self.counts += np.bincount(tokens, minlength=self.vocab_size)
        self.documents += len(documents)
        self.bytes += sum(len(text.encode()) for text in texts)
        while tokens.size:
            if self.writer is None:
                self.writer = ShardWriter(
                    self.folder / f"{self.split}-{len(self.entries):05d}.bin",
                    vocab_size=self.vocab_size,
                    eot_id=self.eot_id,
                    tokenizer_sha256=self.tokenizer_sha256,
                )
            room = self.shard_tokens - self.writer.tokens
            self.writer.write(tokens[:room])
            tokens = tokens[room:]
            if self.writer.tokens == self.shard_tokens:
                self._finish_shard()

    def close(self) -> Split:
        """Finish the last shard and return the counts."""
        self._finish_shard()
        return Split(
            documents=self.documents,
            tokens=int(self.counts.sum()),
            bytes=self.bytes,
            unigram_entropy=entropy(self.counts),
            shards=tuple(self.entries),
        )

    def abort(self) -> None:
        """Let go of the file of an unfinished shard."""
        if self.writer is not None:
            self.writer.abort()

    def _finish_shard(self) -> None:
        if self.writer is not None:
            header = self.writer.close()
            entry = ShardEntry(file=self.writer.file.name, tokens=header.tokens, sha256=header.body_sha256)
            self.entries.append(entry)
            self.writer = None


def joined(splits: Sequence[Split], counts: NDArray[np.int64]) -> Split:
    """One split of the shards of several, whose tokens have `counts` [vocab]."""
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        bytes=sum(split.bytes for split in splits),
        unigram_entropy=entropy(counts),
        shards=tuple(entry for split in splits for entry in split.shards),
    )
