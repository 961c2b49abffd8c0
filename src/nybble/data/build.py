"""Documents to token shards: the tokenizer is trained, each split is written, and the counts are taken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nybble.data.dataset import Dataset
from nybble.data.mixture import Domain
from nybble.data.tokenizer import TextTokenizer, train_tokenizer
from nybble.data.unigram import cross_entropy
from nybble.data.writer import SplitWriter, joined
from nybble.errors import DataError

if TYPE_CHECKING:
    from nybble.data.prepare import PrepareConfig

# Text is tokenised in portions of about this size: enough for all cores, little enough for any memory.
PORTION_CHARACTERS = 1 << 20


def build(
    config: PrepareConfig,
    domains: list[Domain],
    brought: TextTokenizer | None,
    recipe: dict[str, Any],
    folder: Path,
) -> Dataset:
    """Writes everything into `folder`; `recipe` is kept in dataset.json.

    Raises DataError if a split would be empty.
    """
    tokenizer = brought or train_tokenizer(_training_texts(config, domains), config.vocab_size)
    tokenizer.save(folder / "tokenizer")
    names = ["train", *(domain.val for domain in domains)]
    writers = {name: SplitWriter(folder, name, tokenizer, config.shard_tokens) for name in names}
    try:
        for split, texts in _portions(config, domains):
            writers[split].add(texts, tokenizer.encode_batch(texts))
        splits = {name: writer.close() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abort()
    source = " + ".join(domain.splitter.source.name for domain in domains)
    if splits["train"].documents == 0:
        raise DataError(f"{source} leaves no text to train on: bring more or lower --val-fraction")
    for domain in domains:
        if splits[domain.val].documents == 0:
            if domain.splitter.how != "none":
                raise DataError(
                    f"{domain.splitter.source.name} leaves no text to hold out: bring more, raise "
                    "--val-fraction or set it to 0"
                )
            del splits[domain.val]
    held_out = [domain.val for domain in domains if domain.val in splits]
    counts = sum((writers[name].counts for name in held_out), start=writers["train"].counts * 0)
    if held_out and "val" not in splits:
        # The whole held-out text: the shards of the domains, one after the other.
        splits = {
            "train": splits["train"],
            "val": joined([splits[name] for name in held_out], counts),
            **splits,
        }
    dataset = Dataset(
        folder=folder,
        source=source,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer_sha256=tokenizer.sha256,
        splits=splits,
        unigram_loss=cross_entropy(counts, writers["train"].counts) if held_out else None,
        config={**recipe, "held_out_by": ", ".join(dict.fromkeys(domain.splitter.how for domain in domains))},
    )
    dataset.write()
    return dataset


def _training_texts(config: PrepareConfig, domains: list[Domain]) -> Iterator[str]:
    """Each training document once, whatever its weight."""
    room = config.tokenizer_bytes
    with _bar(config, sum(domain.splitter.source.nbytes for domain in domains), "tokenizer") as bar:
        for document in chain.from_iterable(domain.splitter.documents() for domain in domains):
            bar.update(document.source_bytes)
            if document.split == "train" and document.text.strip():
                if room <= 0:
                    break
                yield document.text
                room -= len(document.text.encode())


def _portions(config: PrepareConfig, domains: list[Domain]) -> Iterator[tuple[str, list[str]]]:
    """Documents of one split at a time, about PORTION_CHARACTERS together; empty ones are left out."""
    waiting: dict[str, list[str]] = {"train": [], **{domain.val: [] for domain in domains}}
    sizes = dict.fromkeys(waiting, 0)
    with _bar(config, sum(domain.nbytes for domain in domains), "shards") as bar:
        for document in chain.from_iterable(domain.documents() for domain in domains):
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


def _bar(config: PrepareConfig, nbytes: int, what: str) -> Any:
    return tqdm(
        desc=what,
        total=nbytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=config.quiet or not sys.stderr.isatty(),
    )
