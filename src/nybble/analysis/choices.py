"""Multiple-choice questions out of held-out text: which of four continuations is the true one?

A question is a piece of held-out text, what really follows it, and what follows three other pieces. The
model answers with the continuation to which it gives the least loss a token. Chance is 25 %.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from nybble.data import Dataset
from nybble.errors import DataError

CONTEXT, ANSWER, CHOICES = 48, 16, 4
"""Tokens of the piece, tokens of a continuation, continuations."""


def questions(dataset: Dataset, count: int, seed: int = 0) -> Tensor:
    """int64 [Q, CHOICES, CONTEXT + ANSWER], the true continuation first; the same for the same data and seed.

    Raises DataError if the held-out text is too short for two questions.
    """
    shards = dataset.shards("val")
    length = CONTEXT + ANSWER
    windows = len(shards) // length
    if windows < CHOICES:
        raise DataError(
            f"{dataset.folder}: {len(shards)} held-out tokens make no multiple-choice questions, which need "
            f"{CHOICES * length}; prepare more text, or ask for --questions 0"
        )
    generator = np.random.default_rng(seed)
    asked = generator.permutation(windows)[: min(count, windows)]
    found = np.empty((len(asked), CHOICES, length), dtype=np.int64)
    for row, window in enumerate(asked):
        others = generator.choice(windows - 1, CHOICES - 1, replace=False)
        text = shards.read(window * length, (window + 1) * length)
        for choice, source in enumerate([window, *(other + (other >= window) for other in others)]):
            found[row, choice, :CONTEXT] = text[:CONTEXT]
            found[row, choice, CONTEXT:] = shards.read(source * length + CONTEXT, (source + 1) * length)
    return torch.from_numpy(found)


@torch.no_grad()
def accuracy(model: nn.Module, asked: Tensor, batch: int = 8) -> float:
    """Share of the questions [Q, CHOICES, L] that `model` answers; NaN losses count as wrong answers."""
    model.eval()
    device = next(model.parameters()).device
    right = 0
    for part in asked.split(batch):
        ids = part.flatten(0, 1).to(device)
        logits = model(ids).logits[:, CONTEXT - 1 : -1].float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, CONTEXT:], reduction="none")
        per_choice = losses.mean(-1).view(-1, asked.shape[1]).nan_to_num(nan=math.inf)
        right += int((per_choice[:, :1] < per_choice[:, 1:]).all(-1).sum())
    return right / len(asked)
