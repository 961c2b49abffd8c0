"""A prepared dataset: a folder with `dataset.json`, `tokenizer/` and the shards of each split."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nybble.data.shards import Shards
from nybble.data.tokenizer import TextTokenizer, load_tokenizer
from nybble.errors import DataError

FORMAT = "nybble-dataset"
VERSION = 1
_REMAKE = "make the folder again with `nybble prepare --overwrite`"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard as `dataset.json` lists it."""

    file: str
    tokens: int
    sha256: str
    """Checksum of the body."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Counts of one split."""

    documents: int
    tokens: int
    """Tokens, one end token a document among them."""
    bytes: int
    """UTF-8 bytes of the text."""
    unigram_entropy: float
    """Entropy of its own token distribution, nats a token."""
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What `dataset.json` says. `folder` is where it lies."""

    folder: Path
    source: str
    vocab_size: int
    eot_id: int
    tokenizer_sha256: str
    splits: dict[str, Split]
    unigram_loss: float | None
    """Loss on split "val" of the unigram model of split "train", nats a token; what training has to beat."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the folder was made from: options and the fingerprint of the source."""

    @classmethod
    def open(cls, folder: Path | str) -> "Dataset":
        """Read `dataset.json` and check that the tokeniser is the one that the shards were made with."""
        folder = Path(folder)
        file = folder / "dataset.json"
        if not file.is_file():
            raise DataError(
                f"{folder} is not a prepared dataset (no dataset.json): run `nybble prepare` first"
            )
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise DataError(f"{file} is not version {VERSION} of {FORMAT}: {_REMAKE}")
            splits = {
                str(name): Split(
                    **{**split, "shards": tuple(ShardEntry(**entry) for entry in split["shards"])}
                )
                for name, split in content["splits"].items()
            }
            dataset = cls(
                folder=folder,
                source=str(content["source"]),
                vocab_size=int(content["vocab_size"]),
                eot_id=int(content["eot_id"]),
                tokenizer_sha256=str(content["tokenizer_sha256"]),
                splits=splits,
                unigram_loss=content["unigram_loss"],
                config=dict(content["config"]),
            )
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{file} is malformed ({type(error).__name__}: {error}): {_REMAKE}") from error
        tokenizer_file = dataset.tokenizer_dir / "tokenizer.json"
        try:
            found = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(
                f"tokenizer {tokenizer_file} cannot be read: {error.strerror or error}"
            ) from error
        if found != dataset.tokenizer_sha256:
            raise DataError(
                f"{tokenizer_file} is not the tokenizer that the shards were made with: {_REMAKE}"
            )
        return dataset

    @property
    def tokenizer_dir(self) -> Path:
        """Folder that `AutoTokenizer.from_pretrained` loads."""
        return self.folder / "tokenizer"

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokeniser of the shards."""
        return load_tokenizer(self.tokenizer_dir, self.config.get("eot_token"))

    @cached_property
    def sha256(self) -> str:
        """Identity of the content: tokeniser and the tokens of every split, wherever the folder lies."""
        shards = {name: [entry.sha256 for entry in split.shards] for name, split in self.splits.items()}
        return hashlib.sha256(
            json.dumps([self.tokenizer_sha256, shards], sort_keys=True).encode()
        ).hexdigest()

    def shards(self, split: str, verify: bool | None = None) -> Shards:
        """Open the shards of a split and check that they are the ones that `dataset.json` lists."""
        if split not in self.splits:
            raise DataError(f"{self.folder} has no split {split!r}: it has {', '.join(self.splits)}")
        entries = self.splits[split].shards
        if not entries:
            raise DataError(f"{self.folder}: split {split!r} lists no shard; {_REMAKE}")
        shards = Shards([self.folder / Path(entry.file).name for entry in entries], verify)
        for shard, entry in zip(shards.shards, entries, strict=True):
            header = shard.header
            if (header.vocab_size, header.tokenizer_sha256) != (self.vocab_size, self.tokenizer_sha256):
                raise DataError(f"{shard.file} was made with another tokenizer than {self.folder}: {_REMAKE}")
            if (header.tokens, header.body_sha256) != (entry.tokens, entry.sha256):
                raise DataError(f"{shard.file} is not the shard that dataset.json lists: {_REMAKE}")
        return shards

    def verify(self) -> None:
        """Check every byte of every shard."""
        for split in self.splits:
            self.shards(split, verify=True)

    def check_model_vocab(self, vocab_size: int) -> None:
        """Raise DataError unless a model with `vocab_size` embeddings can read this dataset."""
        if vocab_size < self.vocab_size:
            raise DataError(
                f"{self.folder} has a vocabulary of {self.vocab_size} tokens, the model only {vocab_size}: "
                f"set the model's vocab_size to at least {self.vocab_size}, "
                f"or prepare again with --vocab-size {vocab_size}"
            )

    def write(self) -> None:
        """Write `dataset.json`, safe on disk."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        del content["folder"]
        file = self.folder / "dataset.json"
        with file.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
