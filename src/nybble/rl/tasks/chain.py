"""Chains: sums and differences of many digits, which a worked solution takes one at a time from the left."""

from __future__ import annotations

from random import Random

from nybble.rl.tasks.answer import Exact


class Chain:
    """`3+8-5=` -> `11-5`, `Answer: 6`: 3 to 2 + level digits, no total below 0.

    Level 1 has three digits; with a level of 4 problems of 3, 4, 5 and 6 digits take turns.
    """

    def __init__(self, seed: int = 0, level: int = 1) -> None:
        self.seed, self.level = seed, level

    def problem(self, index: int) -> Exact:
        random = Random(f"chain {self.seed} {index}")
        total = random.randint(0, 9)
        totals, steps = [total], []
        for _ in range(2 + index % self.level):
            digit = random.randint(0, 9)
            sign = "-" if digit <= total and random.random() < 0.5 else "+"
            total += digit if sign == "+" else -digit
            totals.append(total)
            steps.append(f"{sign}{digit}")
        lines = [f"{so_far}{''.join(steps[done:])}" for done, so_far in enumerate(totals)]
        working = "".join(line + "\n" for line in lines[1:-1])
        return Exact(prompt=f"{lines[0]}=\n", answer=lines[-1], working=working)
