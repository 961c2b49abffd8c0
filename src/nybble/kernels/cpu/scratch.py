"""Room for what one pass needs and forgets: fresh memory costs more than what is computed in it.

An operating system gives memory page by page, on the first touch, and a process gives large blocks back when
it frees them; a pass that asks for a few MiB pays for that on every call.
"""

import math
import threading

import torch
from torch import Tensor

LIMIT = 1 << 24
"""Numbers kept for one name, 64 MiB: larger tensors are given back."""

_kept = threading.local()


def room(name: str, *shape: int) -> Tensor:
    """An FP32 tensor of `shape` with any content; the next call of this thread with `name` takes it over."""
    size = math.prod(shape)
    if size > LIMIT:
        return torch.empty(shape)
    buffers: dict[str, Tensor] = _kept.__dict__
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = torch.empty(size)
    return buffers[name][:size].view(shape)
