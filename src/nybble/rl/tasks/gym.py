"""Tasks of reasoning-gym, with a reward of our own: its scorers give credit for any number in a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nybble.errors import ConfigError
from nybble.rl.tasks.answer import MARK, Exact, final_answer, same_answer

EXTRA = "pip install 'nybble[rl]'"
SIZE = 1 << 31
"""Problems of a data set; they are made when they are asked for."""


@dataclass(frozen=True, kw_only=True)
class Scored(Exact):
    """A problem with many right answers: the text of the answer line must get full marks from its scorer."""

    entry: dict[str, Any]
    dataset: Any

    def reward(self, text: str) -> float:
        given = final_answer(text)
        if given is None:
            return 0.0
        if same_answer(given, self.answer):
            return 1.0
        return float(self.dataset.score_answer(answer=given, entry=self.entry) >= 1.0)


class Gym:
    """One task of reasoning-gym. `scored` asks its scorer about answers that differ from the one it gives."""

    def __init__(self, name: str, seed: int = 0, *, scored: bool = False) -> None:
        """Raises ConfigError if reasoning-gym is not installed or has no such task."""
        if name not in gym_names():
            near = ", ".join(sorted(n for n in gym_names() if name[:4] in n)[:6])
            raise ConfigError(
                f"task: reasoning-gym has no task {name!r}" + (f"; near names are {near}" if near else "")
            )
        import reasoning_gym

        self.scored = scored
        self.dataset: Any = reasoning_gym.create_dataset(name, size=SIZE, seed=seed)

    def problem(self, index: int) -> Exact:
        entry = self.dataset[index]
        prompt = f"{entry['question'].strip()}\nEnd with a line `{MARK} ...`.\n"
        answer = str(entry["answer"]).strip()
        if self.scored:
            return Scored(prompt=prompt, answer=answer, entry=entry, dataset=self.dataset)
        return Exact(prompt=prompt, answer=answer)


@cache
def gym_names() -> frozenset[str]:
    """Every task of reasoning-gym. Raises ConfigError naming the extra if it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(f"task: tasks of reasoning-gym need the extra: {EXTRA}") from None
    return frozenset(DATASETS)
