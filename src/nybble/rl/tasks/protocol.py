"""What a task is: any object with these methods will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nybble.errors import ConfigError


class Problem(Protocol):
    """One problem. It may also have `solutions`, a mapping from names of styles to solutions in each."""

    @property
    def prompt(self) -> str:
        """Text that the model continues."""
        ...

    @property
    def solution(self) -> str:
        """A worked solution that earns the whole reward, for fine-tuning; empty if there is none."""
        ...

    def reward(self, text: str) -> float:
        """Reward of the model's text, from 0 to 1."""
        ...


class Task(Protocol):
    """Endless problems: the same index gives the same problem."""

    def problem(self, index: int) -> Problem: ...


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems."""

    task: str = "arithmetic"
    """arithmetic, chain, reverse, countdown, gsm-symbolic, gym:NAME for any task of reasoning-gym, or an
    import path such as my_tasks:make, called with (seed, level)."""
    level: int = 1
    """Difficulty; what it means is the task's affair. Tasks with levels mix all from 1 to this one."""
    task_seed: int = 0
    """Seed of the problems."""

    def __post_init__(self) -> None:
        if self.level < 1:
            raise ConfigError(f"level is {self.level}; it must be at least 1")
