"""Graded arithmetic: sums and differences, of more digits and more terms with the level."""

from __future__ import annotations

from random import Random

from nybble.rl.tasks.answer import Exact

LARGEST = {1: 9, 2: 20, 3: 99, 4: 999}
"""Largest number by level; above the last, a number of digits a level and three terms."""


class Arithmetic:
    """`7+5=` -> `Answer: 12`. Level 1 adds digits; 2 adds and subtracts up to 20; 3 and 4 up to 99 and 999;
    from 5 on three terms."""

    def __init__(self, seed: int = 0, level: int = 1) -> None:
        self.seed, self.level = seed, level

    def problem(self, index: int) -> Exact:
        """Levels take turns."""
        random = Random(f"arithmetic {self.seed} {index}")
        level = 1 + index % self.level
        largest = LARGEST.get(level, 10 ** (level - 1) - 1)
        terms = [random.randint(0, largest) for _ in range(2 if level < 5 else 3)]
        signs = ["+" if level == 1 or random.random() < 0.5 else "-" for _ in terms[1:]]
        text, total = str(terms[0]), terms[0]
        for sign, term in zip(signs, terms[1:], strict=True):
            text += sign + str(term)
            total += term if sign == "+" else -term
        return Exact(prompt=f"{text}=\n", answer=str(total))
