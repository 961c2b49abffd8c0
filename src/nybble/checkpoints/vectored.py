"""Reads and writes of many small tensors in few system calls: neighbours in a file go together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import torch

File = TypeVar("File", bound=Hashable)

MAX_BUFFERS = 512
"""Buffers of one call; Linux allows 1024."""
MAX_BYTES = 1 << 30
"""Bytes of one call; Linux transfers a little under 2^31 at most."""


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def runs(pieces: Iterable[tuple[File, int, memoryview]]) -> Iterator[tuple[File, int, list[memoryview]]]:
    """(file, offset, bytes) pieces, one file after the other, gathered where they touch."""
    by_file: dict[File, list[tuple[int, memoryview]]] = {}
    for file, at, view in pieces:
        if len(view):
            by_file.setdefault(file, []).append((at, view))
    for file, entries in by_file.items():
        entries.sort(key=lambda entry: entry[0])
        views: list[memoryview] = []
        start = end = entries[0][0]
        for at, view in entries:
            if at != end or len(views) == MAX_BUFFERS or end - start + len(view) > MAX_BYTES:
                if views:
                    yield file, start, views
                start, end, views = at, at, []
            views.append(view)
            end += len(view)
        yield file, start, views


def transfer(
    call: Callable[[int, list[memoryview], int], int], file: int, views: list[memoryview], at: int
) -> bool:
    """Run os.preadv or os.pwritev until all bytes went over; False where a file ends before."""
    while views:
        count = call(file, [view[:MAX_BYTES] for view in views], at)
        if count == 0:
            return False
        at += count
        while views and count >= len(views[0]):
            count -= len(views[0])
            views = views[1:]
        if count:
            views = [views[0][count:], *views[1:]]
    return True
