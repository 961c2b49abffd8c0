"""Elementwise passes compiled one by one on GPUs, in seconds where a whole model takes minutes.

Off unless `enable(True)` was called: compiled passes fuse multiplications into additions, so that the last
bits differ from eager ones.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
_enabled = False
SHAPES = 256
"""Sets of shapes for which a region is compiled before torch gives up: several sizes in one process."""


def enable(on: bool) -> None:
    """Whether regions are compiled from now on, in the whole process."""
    global _enabled
    _enabled = on
    if on:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)


@contextmanager
def disabled() -> Iterator[None]:
    """Regions are not compiled in here: for a few passes of shapes that do not come again."""
    before = _enabled
    enable(False)
    try:
        yield
    finally:
        enable(before)


def region(function: F) -> F:
    """`function` of positional arguments, the first a tensor; compiled once for each set of shapes."""
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        nonlocal compiled
        if not _enabled or torch.compiler.is_compiling() or not _on_gpu(arguments[0]):
            return function(*arguments)
        if compiled is None:
            compiled = torch.compile(function, dynamic=False)
        return compiled(*arguments)

    return cast(F, run)


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda
