"""Multiple-choice questions on held-out text: one right answer each, and none where text is short."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import make_data

from nybble.analysis.choices import ANSWER, CHOICES, CONTEXT, accuracy, questions
from nybble.data import Dataset, PrepareConfig, prepare
from nybble.errors import DataError


class Oracle(torch.nn.Module):
    """Predicts with certainty what its text says next."""

    def __init__(self, text: torch.Tensor, vocabulary: int) -> None:
        super().__init__()
        self.text, self.vocabulary = text, vocabulary
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> Any:
        logits = torch.zeros(*ids.shape, self.vocabulary)
        for row, context in enumerate(ids[:, :CONTEXT]):
            at = (self.text.unfold(0, CONTEXT, 1) == context).all(1).nonzero()[0, 0]
            known = self.text[at + CONTEXT : at + CONTEXT + ANSWER]
            logits[row, CONTEXT - 1 : -1].scatter_(1, known[:, None], 9.0)
        return type("Output", (), {"logits": logits})


def test_questions_have_one_right_answer_which_a_model_that_knows_the_text_finds(tmp_path: Path) -> None:
    dataset = Dataset.open(make_data(tmp_path))
    asked = questions(dataset, 5, seed=1)
    assert asked.shape[1:] == (CHOICES, CONTEXT + ANSWER)
    assert torch.equal(asked, questions(dataset, 5, seed=1))
    assert (asked[:, :, :CONTEXT] == asked[:, :1, :CONTEXT]).all()
    shards = dataset.shards("val")
    text = torch.from_numpy(shards.read(0, len(shards)).astype("int64"))
    assert accuracy(Oracle(text, dataset.vocab_size), asked) == 1.0
    ignorant = Oracle(text, dataset.vocab_size)
    ignorant.forward = lambda ids: type("O", (), {"logits": torch.zeros(*ids.shape, dataset.vocab_size)})  # type: ignore[method-assign]
    assert accuracy(ignorant, asked) == 0.0  # a tie is no answer
    assert not math.isnan(accuracy(ignorant, asked))


def test_too_little_text_for_questions_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("few words\n" * 30)
    config = PrepareConfig(source=(str(tmp_path / "a.txt"),), out=tmp_path / "d", vocab_size=300, quiet=True)
    with pytest.raises(DataError, match="make no multiple-choice questions"):
        questions(Dataset.open(prepare(config)), 5)
