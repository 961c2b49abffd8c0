"""The answer of a text: what its last line says after `Answer:`, and nothing else.

A text with no such line, with several, with one that is not last, or with anything beside the answer on it
has no answer; a number elsewhere in the text earns nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

MARK = "Answer:"
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)


def final_answer(text: str) -> str | None:
    """The answer, stripped, or None."""
    lines = text.strip().split("\n")
    if text.count(MARK) != 1 or not lines[-1].startswith(MARK):
        return None
    return lines[-1].removeprefix(MARK).strip() or None


def number(text: str) -> Decimal | None:
    """The number that the whole of `text` is, or None."""
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def same_answer(given: str, wanted: str) -> bool:
    """Equal as numbers if both are numbers, else equal but for runs of white space."""
    a, b = number(given), number(wanted)
    if a is not None and b is not None:
        return a == b
    return given.split() == wanted.split()


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A problem with one right answer."""

    prompt: str
    answer: str
    working: str = ""
    """Lines before the answer in the worked solution."""

    @property
    def solution(self) -> str:
        return f"{self.working}{MARK} {self.answer}"

    @property
    def solutions(self) -> dict[str, str]:
        """By style: with the working, if there is one; the answer line alone; the bare answer, which is as
        right, but earns nothing: no line says that it is the answer."""
        worked = {"worked": self.solution} if self.working else {}
        return {**worked, "direct": f"{MARK} {self.answer}", "bare": self.answer}

    def reward(self, text: str) -> float:
        """1 for the right answer on the last line, else 0."""
        given = final_answer(text)
        return float(given is not None and same_answer(given, self.answer))
