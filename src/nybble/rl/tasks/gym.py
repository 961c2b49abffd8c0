"""Tasks of reasoning-gym, with a reward of our own: its scorers give credit for any number in a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nybble.errors import ConfigError
from nybble.rl.tasks.answer import MARK, Exact, final_answer, same_answer

EXTRA = "pip install 'nybble[rl]'"
SIZE = 1000
"""Problems of one data set. Some prepare something for each of their problems, so the stream goes on with a
data set of another seed."""


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
        self.name, self.seed, self.scored = name, seed, scored
        self._part = -1
        self._dataset: Any = None

    def problem(self, index: int) -> Exact:
        dataset = self._open(index // SIZE)
        entry = dataset[index % SIZE]
        prompt = f"{entry['question'].strip()}\nEnd with a line `{MARK} ...`.\n"
        answer = str(entry["answer"]).strip()
        if self.scored:
            return Scored(prompt=prompt, answer=answer, entry=entry, dataset=dataset)
        return Exact(prompt=prompt, answer=answer)

    def _open(self, part: int) -> Any:
        if part != self._part:
            import reasoning_gym

            seed = (self.seed * 1_000_003 + part) % (1 << 31)
            self._dataset = reasoning_gym.create_dataset(self.name, size=SIZE, seed=seed)
            self._part = part
        return self._dataset


@cache
def gym_names() -> frozenset[str]:
    """Every task of reasoning-gym. Raises ConfigError naming the extra if it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(f"task: tasks of reasoning-gym need the extra: {EXTRA}") from None
    return frozenset(DATASETS)
