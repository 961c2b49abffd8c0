"""Countdown: an expression from given numbers, each used at most once, that equals a target."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from nybble.rl.tasks.answer import MARK, final_answer

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200
"""Characters of an expression that is looked at."""


@dataclass(frozen=True, kw_only=True)
class CountdownProblem:
    """Numbers, a target, and one expression that reaches it."""

    numbers: tuple[int, ...]
    target: int
    expression: str

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))} make {self.target}:\n"

    @property
    def solution(self) -> str:
        return f"{MARK} {self.expression}"

    def reward(self, text: str) -> float:
        """1 if the answer is an expression of the numbers, each at most once, whose value is the target."""
        given = final_answer(text)
        if given is None:
            return 0.0
        found = evaluate(given)
        if found is None:
            return 0.0
        value, used = found
        return float(value == self.target and not Counter(used) - Counter(self.numbers))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of an expression of whole numbers with + - * / and brackets; None for others."""
    if len(text) > LONGEST:
        return None
    used: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError

    try:
        return walk(ast.parse(text, mode="eval").body), used
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


class Countdown:
    """2 + level numbers up to 20, all of which one solution uses."""

    def __init__(self, seed: int = 0, level: int = 1) -> None:
        self.seed, self.level = seed, level

    def problem(self, index: int) -> CountdownProblem:
        random = Random(f"countdown {self.seed} {index}")
        numbers = [random.randint(1, 20) for _ in range(2 + self.level)]
        value, expression = numbers[0], str(numbers[0])
        for n in numbers[1:]:
            sign = random.choice("+-*" if value * n <= 400 else "+-")
            value = {"+": value + n, "-": value - n, "*": value * n}[sign]
            expression = (
                f"({expression}){sign}{n}"
                if sign == "*" and len(expression) > 2
                else f"{expression}{sign}{n}"
            )
        shown = random.sample(numbers, len(numbers))
        return CountdownProblem(numbers=tuple(shown), target=value, expression=expression)
