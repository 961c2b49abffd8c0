"""Batches of packed sequences in a seeded order, the same for any number of ranks, resumable anywhere.

A split is one row of tokens. Window i holds tokens i*S to i*S + S (S + 1 of them): S inputs and, shifted by
one, S labels, so that every token is a label once. An epoch visits every window once, in an order that is a
function of seed and epoch alone; sequence g of a run is window permutation(g mod windows) of epoch g //
windows. A batch is `batch_size` consecutive sequences; rank r of w takes the r-th of w equal slices. The
position is thus one number, the sequences consumed by all ranks together, and survives another batch size
and another number of ranks.

Shapes: B sequences of a rank (batch_size / world), S tokens a sequence.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from nybble.data.dataset import Dataset
from nybble.data.permutation import Permutation
from nybble.errors import DataError

Batch = dict[str, torch.Tensor]
IGNORE = -100
"""Label of padding, as torch's cross entropy wants it."""


class Loader:
    """Endless iterator over training batches; `eval_batches` gives the split once, in order.

    A batch is a dict of int64 CPU tensors [B, S]: `input_ids`; `labels`, where labels[b, s] is the token
    that follows input_ids[b, s] (already shifted: transformers' models shift once more, so don't pass these
    as their `labels`); and with `doc_ids` also `doc_ids` (0 for the document at the start of the window,
    then counting) and `positions` (within the document's part of the window).
    """

    def __init__(
        self,
        dataset: Dataset | Path | str,
        split: str = "train",
        batch_size: int = 1,
        seq_len: int = 1024,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
        doc_ids: bool = False,
    ) -> None:
        """`batch_size` counts the sequences of all ranks; `num_workers` threads read ahead (0: none)."""
        if seq_len < 1:
            raise DataError(f"seq_len is {seq_len}, must be at least 1")
        if world < 1 or not 0 <= rank < world:
            raise DataError(f"rank {rank} of {world}: rank must be within 0 and world - 1")
        if batch_size < 1 or batch_size % world:
            raise DataError(f"batch_size {batch_size} must be a positive multiple of the {world} ranks")
        if num_workers < 0:
            raise DataError(f"num_workers is {num_workers}, must not be negative")
        self.dataset = dataset if isinstance(dataset, Dataset) else Dataset.open(dataset)
        self.shards = self.dataset.shards(split)
        self.split = split
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.rank = rank
        self.world = world
        self.num_workers = num_workers
        self.doc_ids = doc_ids
        self.windows = (len(self.shards) - 1) // seq_len
        """Sequences in an epoch; the tokens after the last whole window are not trained on."""
        self.sequences = 0
        """Sequences that all ranks together have consumed."""
        # A held-out split may be shorter than a window: eval_batches pads.
        if self.windows == 0 and not split.startswith("val"):
            raise DataError(self._too_short())
        self._ahead: deque[Future[Batch]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._permutation: tuple[int, Permutation] | None = None

    @property
    def epoch(self) -> float:
        """Epochs consumed."""
        return self.sequences / max(1, self.windows)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.num_workers == 0:
            batch = self.batch_at(self.sequences)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="nybble-loader")
            while len(self._ahead) < 2 * self.num_workers:
                start = self.sequences + len(self._ahead) * self.batch_size
                self._ahead.append(self._pool.submit(self.batch_at, start))
            batch = self._ahead.popleft().result()
        self.sequences += self.batch_size
        return batch

    def batch_at(self, sequences: int) -> Batch:
        """This rank's part of the batch that starts at global sequence `sequences`; the position stays."""
        if self.windows == 0:
            raise DataError(self._too_short())
        share = self.batch_size // self.world
        first = sequences + self.rank * share
        windows = self._window_of(np.arange(first, first + share, dtype=np.int64))
        tokens = np.stack([self._window(int(window)) for window in windows])
        return self._batch(tokens[:, :-1], tokens[:, 1:])

    def eval_batches(self, max_batches: int | None = None) -> Iterator[Batch]:
        """The whole split once, in order, whatever the seed and position: a fixed validation set.

        All batches have B sequences and all ranks have as many batches; where the text ends, labels are
        IGNORE and inputs the end token. `max_batches` keeps the first ones only.
        """
        per_batch = self.batch_size // self.world
        targets = len(self.shards) - 1
        if targets < 1:
            raise DataError(self._too_short())
        total = -(-targets // (self.seq_len * self.batch_size))
        for index in range(total if max_batches is None else min(total, max_batches)):
            inputs = np.full((per_batch, self.seq_len), self.dataset.eot_id, dtype=np.int64)
            labels = np.full((per_batch, self.seq_len), IGNORE, dtype=np.int64)
            first = index * self.batch_size + self.rank * per_batch
            for row in range(per_batch):
                tokens = self._window(first + row)
                if len(tokens) > 1:
                    inputs[row, : len(tokens) - 1] = tokens[:-1]
                    labels[row, : len(tokens) - 1] = tokens[1:]
            yield self._batch(inputs, labels)

    def state_dict(self) -> dict[str, Any]:
        """The exact position, as plain numbers and strings; the same on every rank."""
        return {
            "dataset": self.dataset.sha256,
            "split": self.split,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "sequences": self.sequences,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; DataError if the order of sequences would not be the one that was saved."""
        mine = self.state_dict()
        for name in ("dataset", "split", "seq_len", "seed"):
            if name not in state:
                raise DataError(f"saved data position lacks {name!r}: it is not the state of a loader")
            if state[name] != mine[name]:
                raise DataError(
                    f"cannot resume: the checkpoint's data has {name} {state[name]!r}, this run "
                    f"{mine[name]!r} ({self.dataset.folder}); resume with the same {name} or start a new run"
                )
        sequences = state.get("sequences")
        if not isinstance(sequences, int) or sequences < 0:
            raise DataError(f"saved data position has sequences {sequences!r}: must be a number from 0")
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self.sequences = sequences

    def close(self) -> None:
        """Stop the threads that read ahead; the loader can still be used and starts them again."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._ahead.clear()

    def _window_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window of each global sequence; a batch may straddle epochs."""
        windows = np.empty_like(sequences)
        epochs = sequences // self.windows
        for epoch in np.unique(epochs).tolist():
            # Kept as one tuple: worker threads swap it at once, and a stale read only costs making it again.
            known = self._permutation
            if known is None or known[0] != epoch:
                known = self._permutation = (epoch, Permutation(self.windows, self.seed, epoch))
            chosen = epochs == epoch
            windows[chosen] = known[1](sequences[chosen] - epoch * self.windows)
        return windows

    def _window(self, window: int) -> NDArray[np.int64]:
        """Tokens [S + 1], fewer or none at the end of the text."""
        start = min(window * self.seq_len, len(self.shards))
        return self.shards.read(start, min(start + self.seq_len + 1, len(self.shards)))

    def _batch(self, inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> Batch:
        batch = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(inputs)),
            "labels": torch.from_numpy(np.ascontiguousarray(labels)),
        }
        if self.doc_ids:
            # The end token belongs to the document that it ends.
            starts = np.zeros_like(inputs, dtype=bool)
            starts[:, 1:] = inputs[:, :-1] == self.dataset.eot_id
            columns = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
            begun = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
            batch["doc_ids"] = torch.from_numpy(starts.cumsum(axis=1).astype(np.int64))
            batch["positions"] = torch.from_numpy((columns - begun).astype(np.int64))
        return batch

    def _too_short(self) -> str:
        return (
            f"{self.dataset.folder}: split {self.split!r} has {len(self.shards)} tokens, a sequence of "
            f"{self.seq_len} needs {self.seq_len + 1}: shorten seq_len or prepare more text"
        )
