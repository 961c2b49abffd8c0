"""Which of a problem's solutions a model is fine-tuned on: the styles of a task, mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

from nybble.errors import ConfigError, DataError
from nybble.rl.tasks.protocol import Problem


def parse_styles(text: str) -> dict[str, float]:
    """`worked=1,direct=3` as weights by style; a name alone weighs 1; empty for an empty text.

    Raises ConfigError for a weight that is no positive number, and for a style without a name or named twice.
    """
    weights: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",") if text.strip()):
        name, _, number = part.partition("=")
        try:
            weight = float(number or 1)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf or name in weights:
            raise ConfigError(
                f"styles: {part!r} is no style with a positive weight, or the second of its name; write them "
                "as worked=1,direct=3"
            )
        weights[name] = weight
    return weights


def choose_solution(problem: Problem, index: int, weights: Mapping[str, float], seed: int) -> str:
    """The solution of problem `index` in a style drawn by weight; without weights its own.

    The draw depends on `seed` and `index` alone. Raises DataError if there is no such solution.
    """
    if not weights:
        text = problem.solution
        if not text:
            raise DataError(f"task: problem {index} has no worked solution to learn from")
        return text
    solutions: Mapping[str, str] = getattr(problem, "solutions", {})
    if missing := [name for name in weights if not solutions.get(name)]:
        known = f"its styles are {', '.join(solutions)}" if solutions else "the task has no styles"
        raise DataError(f"styles: problem {index} has no solution in style {missing[0]!r}; {known}")
    drawn = Random(f"style {seed} {index}").choices(list(weights), list(weights.values()))
    return solutions[drawn[0]]
