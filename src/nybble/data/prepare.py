"""`nybble prepare`: text in, a folder of token shards out; whole or not at all."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from nybble.data.build import build
from nybble.data.corpora import CORPORA, find_corpus
from nybble.data.dataset import Dataset
from nybble.data.mixture import Domain, domain_names
from nybble.data.sources import FileSource, find_files
from nybble.data.split import Splitter
from nybble.data.tokenizer import TextTokenizer, check_vocab_size, load_tokenizer
from nybble.errors import DataError
from nybble.folders import whole_folder


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn text into token shards: train (or take) a tokenizer, hold out a split, write a folder."""

    source: tyro.conf.Positional[tuple[str, ...]] = ("sotu",)
    """Built-in corpora (sotu, wordnet, gcide; NAME:FOLDER where their files lie elsewhere), or files and
    folders of .txt, .md, .jsonl (each also .gz) or .parquet.
    """
    weights: tuple[float, ...] = ()
    """How often an epoch sees each source, in their order; each then has a held-out split of its own, as it
    has where corpora are among several sources. Empty is once.
    """
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
        if self.weights and len(self.weights) != len(self.source):
            raise DataError(
                f"weights has {len(self.weights)} numbers for {len(self.source)} sources: give one for each"
            )
        if any(not 0 < weight <= 1000 for weight in self.weights):
            raise DataError("weights must be above 0 and at most 1000; leave a source out to weigh it 0")
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
    domains = _find_domains(config)
    out = (config.out or Path("data") / _default_name(config.source)).expanduser()
    brought = load_tokenizer(config.tokenizer, config.eot_token) if config.tokenizer else None
    recipe = _recipe(config, domains, brought)
    if out.exists() and not _may_write(out, recipe, config.overwrite):
        _say(config, f"{out} is already prepared from the same text and options; nothing to do")
        return out
    with whole_folder(out, DataError) as folder:
        dataset = build(config, domains, brought, recipe, folder)
    _say(config, _summary(dataset, out))
    return out


def _find_domains(config: PrepareConfig) -> list[Domain]:
    found = [find_corpus(name) for name in config.source]
    for name, corpus in zip(config.source, found, strict=True):
        if corpus is None and not Path(name).expanduser().exists():
            raise DataError(
                f"source {name!r} is neither a file or folder nor a built-in corpus ({', '.join(CORPORA)})"
            )
    if len(found) == 1 or not (config.weights or any(found)):
        source = found[0] if found[0] else find_files(config.source, config.text_field)
        weight = config.weights[0] if config.weights else 1.0
        return [Domain(name="", splitter=Splitter(source, config.val_fraction), weight=weight)]
    names = domain_names([_default_name((name,)) for name in config.source])
    weights = config.weights or (1.0,) * len(found)
    sources = [
        corpus or find_files((name,), config.text_field)
        for name, corpus in zip(config.source, found, strict=True)
    ]
    return [
        Domain(name=name, splitter=Splitter(source, config.val_fraction), weight=weight)
        for name, source, weight in zip(names, sources, weights, strict=True)
    ]


def _default_name(source: tuple[str, ...]) -> str:
    first = source[0].partition(":")[0] if find_corpus(source[0]) else source[0]
    return Path(first).expanduser().resolve().name.split(".")[0] or "text"


def _recipe(config: PrepareConfig, domains: list[Domain], brought: TextTokenizer | None) -> dict[str, Any]:
    """All that decides the content of the folder."""
    files = any(isinstance(domain.splitter.source, FileSource) for domain in domains)
    prints = [domain.splitter.source.fingerprint() for domain in domains]
    mixed = len(domains) > 1 or domains[0].weight != 1
    return {
        "text_sha256": prints[0]
        if len(prints) == 1
        else hashlib.sha256("".join(prints).encode()).hexdigest(),
        "domains": {domain.name: domain.weight for domain in domains} if mixed else None,
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
