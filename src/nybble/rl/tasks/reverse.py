"""Text to be written backwards."""

from __future__ import annotations

from random import Random

from nybble.rl.tasks.answer import Exact

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Reverse:
    """`reverse abc:` -> `Answer: cba`; 2 to 2 + level letters."""

    def __init__(self, seed: int = 0, level: int = 1) -> None:
        self.seed, self.level = seed, level

    def problem(self, index: int) -> Exact:
        random = Random(f"reverse {self.seed} {index}")
        text = "".join(random.choices(LETTERS, k=random.randint(2, 2 + self.level)))
        return Exact(prompt=f"reverse {text}:\n", answer=text[::-1])
