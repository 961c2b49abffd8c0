"""A task by its name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from nybble.errors import ConfigError
from nybble.rl.tasks.arithmetic import Arithmetic
from nybble.rl.tasks.chain import Chain
from nybble.rl.tasks.countdown import Countdown
from nybble.rl.tasks.gym import Gym
from nybble.rl.tasks.protocol import Task, TaskConfig
from nybble.rl.tasks.reverse import Reverse

_OWN: dict[str, Callable[[int, int], Task]] = {
    "arithmetic": Arithmetic,
    "chain": Chain,
    "reverse": Reverse,
    "countdown": Countdown,
    "gsm-symbolic": lambda seed, _level: Gym("gsm_symbolic", seed),
}


def names() -> list[str]:
    """Tasks that need no import path."""
    return sorted(_OWN)


def find_task(config: TaskConfig) -> Task:
    """The task that `config` names.

    `gym:NAME` is a task of reasoning-gym with one right answer, `gym-scored:NAME` one with many, judged by
    its scorer; `package.module:name` is called with (seed, level).

    Raises ConfigError for a name that stands for nothing, with the nearest ones.
    """
    name = config.task
    if name in _OWN:
        return _OWN[name](config.task_seed, config.level)
    kind, _, rest = name.partition(":")
    if kind in ("gym", "gym-scored") and rest:
        return Gym(rest, config.task_seed, scored=kind == "gym-scored")
    if rest:
        return _imported(kind, rest, config)
    near = difflib.get_close_matches(name, _OWN, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"task: there is no task {name!r}; choose {', '.join(names())}, gym:NAME, or "
        f"package.module:name{hint}"
    )


def _imported(module: str, attribute: str, config: TaskConfig) -> Task:
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task: {module}:{attribute} cannot be imported: {error}") from None
    try:
        task: Task = make(config.task_seed, config.level)
    except Exception as error:
        raise ConfigError(
            f"task: {module}:{attribute}(seed, level) raised {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(task, "problem", None)):
        raise ConfigError(
            f"task: {module}:{attribute} made {type(task).__name__}, which has no problem(index)"
        )
    return task
