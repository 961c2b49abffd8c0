"""Byte-level BPE, trained here or brought along; stored as a folder that AutoTokenizer loads."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nybble.errors import DataError

EOT = "<|endoftext|>"
PAD = "<|pad|>"
# 256 bytes and the two special tokens: with these alone every text can be written.
SMALLEST_VOCAB = 258
LARGEST_VOCAB = 1 << 24
_EOT_CANDIDATES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
# Files beside tokenizer.json that transformers reads; a tokeniser that is brought along keeps them.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokeniser with the two tokens that packing needs. Two are the same if their sha256 is."""

    json_bytes: bytes
    """Content of tokenizer.json."""
    eot_token: str
    pad_token: str
    companions: dict[str, bytes] = field(default_factory=dict)
    """Content of the files beside it, by name."""

    def __post_init__(self) -> None:
        backend = Tokenizer.from_buffer(self.json_bytes)
        backend.no_padding()
        backend.no_truncation()
        # A document that quotes "<|endoftext|>" must not end itself: its letters become plain tokens.
        backend.encode_special_tokens = True
        object.__setattr__(self, "_backend", backend)

    @property
    def backend(self) -> Tokenizer:
        """The object of the tokenizers library."""
        return self._backend  # type: ignore[attr-defined]

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json, in hexadecimal."""
        return hashlib.sha256(self.json_bytes).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eot_id(self) -> int:
        """Id of the token that ends a document."""
        return self._id(self.eot_token)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._id(self.pad_token)

    def _id(self, token: str) -> int:
        found = self.backend.token_to_id(token)
        if found is None:
            raise DataError(f"tokenizer has no token {token!r}")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special token."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of several texts, on all cores."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(
            self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)
        )

    def save(self, folder: Path) -> None:
        """Write the folder that `AutoTokenizer.from_pretrained` and `load_tokenizer` read."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self.json_bytes)
        companions = {"tokenizer_config.json": self._config(), **self.companions}
        for name, content in companions.items():
            (folder / name).write_bytes(content)

    def _config(self) -> bytes:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eot_token,
            "pad_token": self.pad_token,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            # transformers' own mark for "no limit": the length is the model's affair.
            "model_max_length": int(1e30),
        }
        return (json.dumps(config, indent=2) + "\n").encode()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE; the same texts in the same order give the same bytes.

    The vocabulary is smaller than `vocab_size` where the text has too few pairs to merge.
    """
    check_vocab_size(vocab_size)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(json_bytes=backend.to_str(pretty=True).encode(), eot_token=EOT, pad_token=PAD)


def check_vocab_size(vocab_size: int) -> None:
    """Raise DataError for a size that no byte-level BPE can have."""
    if not SMALLEST_VOCAB <= vocab_size <= LARGEST_VOCAB:
        raise DataError(
            f"vocab_size is {vocab_size}: choose at least {SMALLEST_VOCAB} (256 bytes and 2 special tokens) "
            f"and at most {LARGEST_VOCAB}"
        )


def load_tokenizer(path: Path | str, eot_token: str | None = None) -> TextTokenizer:
    """Load a tokeniser from a folder, a tokenizer.json or a folder that `nybble prepare` wrote.

    `eot_token` names the token that ends a document; without it <|endoftext|>, the folder's eos_token or a
    customary name is used, in this order.
    """
    path = Path(path).expanduser()
    if (path / "dataset.json").is_file():
        path = path / "tokenizer"
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {file} cannot be read: {error.strerror or error}") from error
    companions = {
        name: (file.parent / name).read_bytes() for name in _COMPANIONS if (file.parent / name).is_file()
    }
    if not path.is_dir():
        companions = {}
    try:
        vocabulary = Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise DataError(f"{file} is not a tokenizer of the tokenizers library ({error})") from error
    eos, pad = _declared_tokens(companions, file)
    if eot_token is not None and eot_token not in vocabulary:
        raise DataError(f"{file} has no token {eot_token!r}: name one of its own with --eot-token")
    customary = (EOT, eos, *_EOT_CANDIDATES)
    eot = eot_token or next((token for token in customary if token is not None and token in vocabulary), None)
    if eot is None:
        raise DataError(f"{file} has no token that ends a document: name one of its own with --eot-token")
    pad = next((token for token in (pad, PAD) if token is not None and token in vocabulary), eot)
    return TextTokenizer(json_bytes=content, eot_token=eot, pad_token=pad, companions=companions)


def _declared_tokens(companions: dict[str, bytes], file: Path) -> tuple[str | None, str | None]:
    """eos_token and pad_token of tokenizer_config.json: each a string, an object with `content`, or None."""
    try:
        config = json.loads(companions.get("tokenizer_config.json", b"{}"))
        tokens = [config.get("eos_token"), config.get("pad_token")]
        eos, pad = (token["content"] if isinstance(token, dict) else token for token in tokens)
    except (ValueError, AttributeError, KeyError) as error:
        raise DataError(
            f"{file.parent / 'tokenizer_config.json'} is malformed ({error}): mend or remove it"
        ) from error
    return eos, pad
