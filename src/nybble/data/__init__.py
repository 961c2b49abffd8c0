"""Corpora, tokeniser, token shards and the loader that feeds training."""

from nybble.data.corpora import CORPORA, Corpus
from nybble.data.dataset import Dataset, ShardEntry, Split
from nybble.data.loader import IGNORE, Batch, Loader
from nybble.data.permutation import Permutation
from nybble.data.prepare import PrepareConfig, prepare
from nybble.data.shards import Shard, Shards, ShardWriter
from nybble.data.sources import Document, FileSource, find_files
from nybble.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "CORPORA",
    "IGNORE",
    "Batch",
    "Corpus",
    "Dataset",
    "Document",
    "FileSource",
    "Loader",
    "Permutation",
    "PrepareConfig",
    "Shard",
    "ShardEntry",
    "ShardWriter",
    "Shards",
    "Split",
    "TextTokenizer",
    "find_files",
    "load_tokenizer",
    "prepare",
    "train_tokenizer",
]
