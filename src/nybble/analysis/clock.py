"""How long a call takes on a device, and the ceilings of the device: copy bandwidth and matrix rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[[], object]


def milliseconds(call: Call, device: torch.device, seconds: float = 0.2) -> float:
    """Median time of `call` over about `seconds`, after it was called twice.

    On a GPU the call is captured as a graph and replayed between events, so that the host's time does not
    count; what cannot be captured is launched as it is.
    """
    call()
    call()
    if device.type == "cuda":
        return _on_gpu(_captured(call), seconds)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _captured(call: Call) -> Call:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    graph.replay()
    return graph.replay


def _on_gpu(call: Call, seconds: float) -> float:
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds * 1e3 and len(times) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    size = (1 << 31) if device.type == "cuda" else (1 << 27)
    a = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    if device.type == "cuda":
        # Not in a graph: there a copy becomes a node that the copy engines run, at two thirds of the speed.
        return 2 * size / _on_gpu(lambda: b.copy_(a), 0.1) * 1e3
    return 2 * size / milliseconds(lambda: b.copy_(a), device) * 1e3


def matrix_rate(device: torch.device) -> float:
    """Operations a second of a large matrix product: BF16 on a GPU, FP32 on a CPU, which computes in it."""
    n = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a: Tensor = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / milliseconds(lambda: a @ b, device) * 1e3
