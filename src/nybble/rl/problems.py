"""The stream of problems of a run: one part of the prompts to train on, another that is held out."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from nybble.data import TextTokenizer
from nybble.errors import DataError
from nybble.rl.tasks import Problem, Task

HELD_OUT = 10
"""One prompt in this many, by its hash, is held out: a small task repeats its prompts, so that an index tells
nothing."""
SEARCH = 10_000
"""Problems in a row that may fall into the other part, or fail, before the task is called unusable."""


@dataclass(frozen=True)
class Posed:
    """A problem with its index and the tokens of its prompt."""

    index: int
    problem: Problem
    tokens: tuple[int, ...]


def held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training."""
    return zlib.crc32(prompt.encode()) % HELD_OUT == 0


class Problems:
    """Problems of one part, from any index on. `skipped` counts those that could not be posed."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, longest: int, *, held_out: bool = False) -> None:
        """`longest` tokens of a prompt leave room for what follows it in the model's window."""
        self.task, self.tokenizer, self.longest, self.held_out = task, tokenizer, longest, held_out
        self.skipped = 0
        self.reason = ""
        """Why the last one was skipped."""

    def take(self, first: int, count: int) -> tuple[list[Posed], int]:
        """`count` problems from index `first` on, and the index after the last.

        Raises DataError if none of `SEARCH` problems in a row can be posed.
        """
        found: list[Posed] = []
        stream = self._from(first)
        while len(found) < count:
            found.append(next(stream))
        return found, found[-1].index + 1 if found else first

    def _from(self, index: int) -> Iterator[Posed]:
        vain = 0
        while True:
            posed = self._pose(index)
            index += 1
            if posed is not None:
                vain = 0
                yield posed
                continue
            vain += 1
            if vain == SEARCH:
                why = self.reason or f"no prompt is in the {'held-out' if self.held_out else 'training'} part"
                raise DataError(f"task: no usable problem among {SEARCH}: {why}")

    def _pose(self, index: int) -> Posed | None:
        try:
            problem = self.task.problem(index)
            prompt = problem.prompt
            if held_out(prompt) != self.held_out:
                return None
            tokens = tuple(self.tokenizer.encode(prompt))
        except Exception as error:  # a task is the user's code: one bad problem must not end the run
            self.reason = f"problem {index} raised {type(error).__name__}: {error}"
        else:
            if 0 < len(tokens) <= self.longest:
                return Posed(index, problem, tokens)
            self.reason = f"problem {index} has {len(tokens)} prompt tokens, not 1 to {self.longest}"
        self.skipped += 1
        return None
