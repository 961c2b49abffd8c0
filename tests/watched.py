"""Triton's interpreter with an eye on addresses.

`watched.py SCRIPT ARGUMENTS` runs a script in which a load or store that its mask lets through, outside of
the tensors that the launch was given, is an error. A GPU faults there only where no memory of its process
lies, as tests of small shapes seldom do.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBoundsError(Exception):
    """A kernel touches memory that is not its own."""


class Watch:
    """The memory of the launch that runs."""

    def __init__(self) -> None:
        self.kernel = ""
        self.begins, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def enter(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        """Allow the elements of `tensors` alone."""
        spans: list[list[int]] = []
        for begin, end in sorted(span(t) for t in tensors if t.numel()):
            if spans and begin <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        self.kernel = kernel
        self.begins = np.array([s[0] for s in spans], np.uint64)
        self.ends = np.array([s[1] for s in spans], np.uint64)

    def check(self, addresses: Any, mask: Any, size: int) -> None:
        """Raise if any of the masked addresses, of elements of `size` bytes, is not allowed."""
        a = np.asarray(addresses, np.uint64)[np.asarray(mask, bool)]
        if not a.size:
            return
        at = np.searchsorted(self.begins, a, side="right").astype(np.int64) - 1
        ok = (at >= 0) & (len(self.ends) > 0)
        ok[ok] = a[ok] + np.uint64(size) <= self.ends[at[ok]]
        if not ok.all():
            first = int(a[~ok][0])
            near = min((abs(first - int(b)), first - int(b)) for b in (*self.begins, *self.ends))[1]
            raise OutOfBoundsError(
                f"{self.kernel} touches {(~ok).sum()} elements outside its tensors, the first {near} bytes "
                "from the nearest bound of one"
            )


def span(t: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first element of a tensor to behind its last."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """Those of a launch's arguments, in tuples of tuples and in descriptors too."""
    for value in values:
        if isinstance(value, tuple):
            yield from tensors(value)
        elif hasattr(value, "base") and hasattr(value, "block_shape"):
            yield interpreter._unwrap_tensor(value.base)
        elif hasattr(value, "data_ptr"):
            yield interpreter._unwrap_tensor(value)


def install() -> None:
    """Watch every launch of this process."""
    watch = Watch()
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    begin = executor._init_args_hst
    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def begin_watched(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = begin(self, args, kwargs)
        values = [*hosts[0], *hosts[1].values()]
        watch.enter(self.fn.__name__, list(tensors(values)))
        return hosts

    def size_of(pointers: Any) -> int:
        return int(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)

    def load_watched(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        watch.check(ptrs.data, mask.data, size_of(ptrs))
        return load(self, ptrs, mask, *rest)

    def store_watched(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.check(ptrs.data, mask.data, size_of(ptrs))
        return store(self, ptrs, value, mask, *rest)

    def rmw_watched(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.check(ptr.data, mask.data, size_of(ptr))
        return rmw(self, op, ptr, value, mask, *rest)

    executor._init_args_hst = begin_watched
    builder.create_masked_load, builder.create_masked_store = load_watched, store_watched
    builder.create_atomic_rmw = rmw_watched


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
