"""Verifiable tasks: a prompt, and a reward of the text that follows it."""

from nybble.rl.tasks.find import find_task, names
from nybble.rl.tasks.protocol import Problem, Task, TaskConfig
from nybble.rl.tasks.styles import choose_solution, parse_styles

__all__ = ["Problem", "Task", "TaskConfig", "choose_solution", "find_task", "names", "parse_styles"]
