"""Verifiable tasks: a prompt, and a reward of the text that follows it."""

from nybble.rl.tasks.find import find_task, names
from nybble.rl.tasks.protocol import Problem, Task, TaskConfig

__all__ = ["Problem", "Task", "TaskConfig", "find_task", "names"]
