"""Problems with the solutions that a model is fine-tuned on, packed into batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble import together
from nybble.data import TextTokenizer
from nybble.errors import ConfigError, DataError
from nybble.pretrain.config import BatchConfig
from nybble.pretrain.loop import IGNORE
from nybble.rl.problems import Problems
from nybble.rl.tasks import Problem


class SolvedProblems:
    """Batches of prompts with their solutions, packed as documents; only solutions are targets.

    A batch is dict of int64 [B, S]: input_ids, labels (shifted, -100 is no target), doc_ids. Each of several
    ranks packs the same rows and gives its own, with the `share` of its mean in the mean over all targets.
    """

    def __init__(
        self,
        problems: Problems,
        tokenizer: TextTokenizer,
        batch: BatchConfig,
        solution: Callable[[Problem, int], str],
    ) -> None:
        """`solution` is the text to learn for a problem and its index. Raises ConfigError if the ranks cannot
        share out the rows equally."""
        self.problems, self.tokenizer, self.batch, self.solution = problems, tokenizer, batch, solution
        self.next_problem = 0
        if batch.batch % together.world():
            raise ConfigError(
                f"batch is {batch.batch} sequences, which {together.world()} ranks cannot share out equally"
            )

    def __next__(self) -> dict[str, Tensor]:
        B, S = self.batch.batch, self.batch.sequence
        ids = np.full((B, S), self.tokenizer.pad_id, dtype=np.int64)
        labels = np.full((B, S), IGNORE, dtype=np.int64)
        docs = np.full((B, S), -1, dtype=np.int64)
        for row in range(B):
            start = document = 0
            while True:
                posed, following = self.problems.take(self.next_problem, 1)
                prompt = posed[0].tokens
                text = self.solution(posed[0].problem, posed[0].index)
                line = [*prompt, *self.tokenizer.encode(text), self.tokenizer.eot_id]
                size = len(line) - 1
                if size > S:
                    raise DataError(
                        f"problem {posed[0].index} and its solution take {size} tokens; raise --sequence, "
                        f"which is {S}"
                    )
                if start + size > S:
                    break  # it opens the next row
                ids[row, start : start + size] = line[:-1]
                labels[row, start + len(prompt) - 1 : start + size] = line[len(prompt) :]
                docs[row, start : start + size] = document
                start, document, self.next_problem = start + size, document + 1, following
        rows = B // together.world()
        mine = slice(together.rank() * rows, (together.rank() + 1) * rows)
        tensors = {"input_ids": ids, "labels": labels, "doc_ids": docs}
        found = {name: torch.from_numpy(array[mine]) for name, array in tensors.items()}
        if together.active():
            share = together.world() * (labels[mine] != IGNORE).sum() / (labels != IGNORE).sum()
            found["share"] = torch.tensor(share, dtype=torch.float32)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"next_problem": self.next_problem}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_problem = state["next_problem"]
