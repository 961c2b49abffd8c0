"""`nybble prepare`: text in, a folder of token shards out; whole or not at all."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from nybble.data.corpora import CORPORA, Corpus
from nybble.data.dataset import Dataset
from nybble.data.folders import whole_folder
from nybble.data.sources import FileSource, find_files
from nybble.data.split import Splitter
from nybble.data.tokenizer import TextTokenizer, check_vocab_size, load_tokenizer, train_tokenizer
from nybble.data.unigram import cross_entropy
from nybble.data.writer import SplitWriter
from nybble.errors import DataError

# Text is tokenised in portions of about this size: enough for all cores, little enough for any memory.
PORTION_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn text into token shards: train (or take) a tokenizer, hold out a split, write a folder."""

    source: tyro.conf.Positional[tuple[str, ...]] = ("sotu",)
    """A built-in corpus (sotu), or files and folders of .txt, .md, .jsonl (each also .gz) or .parquet."""
    out: Path | None = None
    """Folder to write; by default data/ and the name of the corpus, file or folder."""
    vocab_size: int = 4096
    """Tokens of the byte-level BPE to train; ignored with --tokenizer."""
    tokenizer: Path | None = None
    """Use this tokenizer (a folder or a tokenizer.json) and train none."""
    eot_token: str | None = None
    """Token of --tokenizer that ends a document; by default <|endoftext|> or its eos_token."""
    val_fraction: float = 0.02
    """Share of the documents to hold out (of each one, if they are few); a built-in corpus knows its own."""
    text_field: str = "text"
    """JSONL field or Parquet column that holds the text."""
    shard_tokens: int = 1 << 27
    """Tokens of a shard at most."""
    tokenizer_bytes: int = 1 << 30
    """Train the tokenizer on this many bytes of the training split at most."""
    overwrite: bool = False
    """Replace a dataset folder that was made with other options or text."""
    quiet: bool = False
    """No progress bar and no summary."""

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            object.__setattr__(self, "source", (self.source,))
        if self.out is not None:
            object.__setattr__(self, "out", Path(self.out))
        if not self.source:
            raise DataError(f"source is empty: name files, folders or a corpus ({', '.join(CORPORA)})")
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"val_fraction is {self.val_fraction}: choose a number from 0 and below 1")
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)
            if self.eot_token is not None:
                raise DataError("eot_token names a token of an existing tokenizer: give one with --tokenizer")
        for name in ("shard_tokens", "tokenizer_bytes"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}, must be at least 1")


def prepare(config: PrepareConfig) -> Path:
    """Write the dataset folder and return it; does nothing if it is there from the same text and options.

    Everything is written to a temporary folder beside `out` that is renamed at the end: whatever stands
    under the name `out` is whole. Raises DataError for text, options or folders that do not allow it.
    """
    source = _find_source(config)
    out = (config.out or Path("data") / _default_name(config.source)).expanduser()
    brought = load_tokenizer(config.tokenizer, config.eot_token) if config.tokenizer else None
    recipe = _recipe(config, source, brought)
    if out.exists() and not _may_write(out, recipe, config.overwrite):
        _say(config, f"{out} is already prepared from the same text and options; nothing to do")
        return out
    with whole_folder(out) as folder:
        dataset = _build(config, source, brought, recipe, folder)
    _say(config, _summary(dataset, out))
    return out


def _find_source(config: PrepareConfig) -> Corpus | FileSource:
    if len(config.source) == 1 and config.source[0] in CORPORA:
        return CORPORA[config.source[0]]
    for name in config.source:
        if name not in CORPORA and not Path(name).expanduser().exists():
            raise DataError(
                f"source {name!r} is neither a file or folder nor a built-in corpus ({', '.join(CORPORA)})"
            )
        if name in CORPORA:
            raise DataError(f"corpus {name!r} cannot be joined with other sources: prepare it alone")
    return find_files(config.source, config.text_field)


def _default_name(source: tuple[str, ...]) -> str:
    return Path(source[0]).expanduser().resolve().name.split(".")[0] or "text"


def _recipe(
    config: PrepareConfig, source: Corpus | FileSource, brought: TextTokenizer | None
) -> dict[str, Any]:
    """All that decides the content of the folder."""
    files = isinstance(source, FileSource)
    return {
        "text_sha256": source.fingerprint(),
        "vocab_size": brought.vocab_size if brought else config.vocab_size,
        "tokenizer_sha256": brought.sha256 if brought else None,
        "eot_token": brought.eot_token if brought else None,
        "val_fraction": config.val_fraction if files else None,
        "text_field": config.text_field if files else None,
        "shard_tokens": config.shard_tokens,
        "tokenizer_bytes": None if brought else config.tokenizer_bytes,
    }


def _may_write(out: Path, recipe: dict[str, Any], overwrite: bool) -> bool:
    """True to write `out`, False if it is finished already; DataError where that would destroy something."""
    if not out.is_dir():
        raise DataError(f"{out} exists and is not a folder: choose another --out")
    entries = [entry.name for entry in out.iterdir()]
    if not entries:
        return True
    strange = [
        name for name in entries if name not in ("dataset.json", "tokenizer") and not name.endswith(".bin")
    ]
    if "dataset.json" not in entries or strange:
        what = f"holds {strange[0]}" if strange else "has no dataset.json"
        raise DataError(f"{out} is not a folder of prepared data alone ({what}): choose another --out")
    if overwrite:
        return True
    dataset = Dataset.open(out)
    changed = [name for name, value in recipe.items() if dataset.config.get(name) != value]
    if changed:
        name = changed[0]
        was, now = dataset.config.get(name), recipe[name]
        what = "other text" if name == "text_sha256" else f"{name} {was}, not {now}"
        raise DataError(
            f"{out} was prepared from {what}: choose another --out or replace it with --overwrite"
        )
    for split in dataset.splits:
        dataset.shards(split)
    return False


def _build(
    config: PrepareConfig,
    source: Corpus | FileSource,
    brought: TextTokenizer | None,
    recipe: dict[str, Any],
    folder: Path,
) -> Dataset:
    splitter = Splitter(source, config.val_fraction)
    tokenizer = brought or train_tokenizer(_training_texts(config, splitter), config.vocab_size)
    tokenizer.save(folder / "tokenizer")
    writers = {name: SplitWriter(folder, name, tokenizer, config.shard_tokens) for name in ("train", "val")}
    try:
        for split, texts in _portions(config, splitter):
            writers[split].add(texts, tokenizer.encode_batch(texts))
        splits = {name: writer.close() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abort()
    if splits["train"].documents == 0:
        raise DataError(f"{source.name} leaves no text to train on: bring more or lower --val-fraction")
    if splits["val"].documents == 0:
        if splitter.how != "none":
            raise DataError(
                f"{source.name} leaves no text to hold out: bring more, raise --val-fraction or set it to 0"
            )
        del splits["val"]
    dataset = Dataset(
        folder=folder,
        source=source.name,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer_sha256=tokenizer.sha256,
        splits=splits,
        unigram_loss=cross_entropy(writers["val"].counts, writers["train"].counts)
        if "val" in splits
        else None,
        config={**recipe, "held_out_by": splitter.how},
    )
    dataset.write()
    return dataset


def _training_texts(config: PrepareConfig, splitter: Splitter) -> Iterator[str]:
    room = config.tokenizer_bytes
    with _bar(config, splitter, "tokenizer") as bar:
        for document in splitter.documents():
            bar.update(document.source_bytes)
            if document.split == "train" and document.text.strip():
                if room <= 0:
                    break
                yield document.text
                room -= len(document.text.encode())


def _portions(config: PrepareConfig, splitter: Splitter) -> Iterator[tuple[str, list[str]]]:
    """Documents of one split at a time, about PORTION_CHARACTERS together; empty ones are left out."""
    waiting: dict[str, list[str]] = {"train": [], "val": []}
    sizes = dict.fromkeys(waiting, 0)
    with _bar(config, splitter, "shards") as bar:
        for document in splitter.documents():
            split = document.split or "train"
            if document.text.strip():
                waiting[split].append(document.text)
                sizes[split] += len(document.text)
                if sizes[split] >= PORTION_CHARACTERS:
                    yield split, waiting[split]
                    waiting[split], sizes[split] = [], 0
            bar.update(document.source_bytes)
        for split, texts in waiting.items():
            if texts:
                yield split, texts


def _bar(config: PrepareConfig, splitter: Splitter, what: str) -> Any:
    return tqdm(
        desc=what,
        total=splitter.source.nbytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=config.quiet or not sys.stderr.isatty(),
    )


def _summary(dataset: Dataset, out: Path) -> str:
    lines = [f"{out}: {dataset.source}, vocabulary {dataset.vocab_size}"]
    for name, split in dataset.splits.items():
        lines.append(
            f"  {name:5s} {split.documents:>9,} documents {split.tokens:>13,} tokens, "
            f"{split.bytes / max(1, split.tokens):.2f} bytes a token, "
            f"unigram entropy {split.unigram_entropy:.3f} nats"
        )
    if dataset.unigram_loss is not None:
        lines.append(f"  loss of the unigram model of train on val: {dataset.unigram_loss:.3f} nats a token")
    asked = dataset.config["vocab_size"]
    if asked != dataset.vocab_size:
        lines.append(f"  the text has pairs for {dataset.vocab_size} of the {asked} tokens asked for")
    return "\n".join(lines)


def _say(config: PrepareConfig, text: str) -> None:
    if not config.quiet:
        print(text)
