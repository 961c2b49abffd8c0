"""One layer of experts on several ranks against the same layer on one; each function runs on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from nybble.layers import convert as convert_alone
from nybble.layers import gemm, set_step
from nybble.parallel import Monitor, convert
from nybble.parallel.launch import joined, rank_device
from nybble.parallel.wire import Pending

T, H, WIDTH, E, K = 96, 64, 32, 4, 2
STOCHASTIC = {"format": "mxfp8", "rounding": "stochastic"}
RULE = {
    "modules": "**",
    "fprop": {"x": {"format": "nvfp4", "outer": "row"}, "w": {"format": "nvfp4", "outer": "matrix"}},
    "dgrad": {"dy": STOCHASTIC, "w": {**STOCHASTIC, "source": "forward"}},
    "wgrad": {"dy": STOCHASTIC, "x": {**STOCHASTIC, "source": "forward"}},
}


class Fused(nn.Module):
    """Gated experts in the layout of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * WIDTH, H) / 8)
        self.down_proj = nn.Parameter(torch.randn(E, H, WIDTH) / 6)
        self.act_fn = nn.SiLU()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Fused()


def recipe(legs: dict[str, str], rule: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": "test", "rule": [rule or RULE], "traffic": legs}


def batch(route: str = "spread") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, experts, weights and dy of the whole batch."""
    torch.manual_seed(5)
    # As on a GPU, where activations are BF16.
    x, dy = torch.randn(T, H).bfloat16().float(), torch.randn(T, H).bfloat16().float()
    weights = torch.rand(T, K) + 0.1
    index = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    if route == "first":  # all tokens to experts of rank 0
        index = torch.tensor([[0, 1]]).repeat(T, 1)
    if route == "one":
        index = torch.tensor([[E - 1, E]]).repeat(T, 1)  # E is an expert that is not there
    return x, index, weights, dy


@contextmanager
def operands() -> Iterator[list[tuple[str, Tensor, Tensor, list[int]]]]:
    """Values of both operands of every grouped product, and where groups end."""
    seen: list[tuple[str, Tensor, Tensor, list[int]]] = []
    rows, columns = gemm.grouped_rows, gemm.grouped_columns

    def watched(name: str, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(a: Tensor, b: Tensor, offs: Tensor, last: Any, **named: Any) -> Tensor:
            seen.append((name, a.clone(), b.clone(), offs.tolist()))
            return product(a, b, offs, last, **named)

        return call

    gemm.grouped_rows, gemm.grouped_columns = watched("rows", rows), watched("columns", columns)
    try:
        yield seen
    finally:
        gemm.grouped_rows, gemm.grouped_columns = rows, columns


@contextmanager
def waits() -> Iterator[list[str]]:
    """Exchanges in the order in which they are waited for."""
    order: list[str] = []
    once = Pending.wait

    def wait(self: Pending) -> Tensor:
        order.append(self.leg)
        return once(self)

    Pending.wait = wait
    try:
        yield order
    finally:
        Pending.wait = once


def passed(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor, dy: Tensor) -> dict[str, Any]:
    """One pass forth and back: output, gradients, operands, and the order of waits and of other work."""
    module.zero_grad()
    set_step(module, 7, 0, seed=11)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with operands() as seen, waits() as order:
        y = module.experts(x, index, weights, meanwhile=lambda: order.append("work"))
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, "operands": seen, "order": order}


def compare(
    device: str, legs: dict[str, str], route: str, rule: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What this rank's pass has in common with one process's: differences, and whether operands are the
    same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, monitor = Model().to(device), Monitor()
    convert_alone(whole, recipe({}, rule))
    x, index, weights, dy = (t.to(device) for t in batch(route))
    if device == "cuda":
        x, dy = x.bfloat16(), dy.bfloat16()
    alone = passed(whole, x, index, weights, dy)

    model = Model().to(device)
    mesh = init_device_mesh(device, (world,))
    convert(model, recipe(legs, rule), mesh=mesh, monitor=monitor)
    # Unequal parts where all tokens go one way: the last rank has none.
    ends = [T, T] if route == "first" else [T * (r + 1) // world for r in range(world)]
    mine = slice(0 if rank == 0 else ends[rank - 1], ends[rank])
    shared = passed(model, x[mine], index[mine], weights[mine], dy[mine])

    each = E // world
    here = range(rank * each, (rank + 1) * each)
    found: dict[str, Any] = {
        name: float((shared[name] - alone[name][mine]).abs().max()) if mine.stop > mine.start else 0.0
        for name in ("y", "dx", "dweights")
    }
    for name in ("gate_up_proj", "down_proj"):
        grad = getattr(model.experts, name).grad.to_local()
        found[name] = float((grad - getattr(whole.experts, name).grad[list(here)]).abs().max())
    found["operands"] = [
        _same_groups(a, b, here) for a, b in zip(alone["operands"], shared["operands"], strict=True)
    ]
    found["order"] = shared["order"]
    found["bytes"], _ = monitor.meter.take()
    found["rows"] = len(shared["operands"][0][1]) // K
    return found


def _same_groups(whole: Any, part: Any, here: range) -> bool:
    """Whether the operands of the experts in `here` are equal, bit for bit, in both."""
    name, a, b, ends = whole
    _, a_part, b_part, ends_part = part
    for local, e in enumerate(here):
        rows = slice(ends[e - 1] if e else 0, ends[e])
        rows_part = slice(ends_part[local - 1] if local else 0, ends_part[local])
        if not torch.equal(a[rows], a_part[rows_part]):
            return False
        if not torch.equal(
            b[e] if name == "rows" else b[rows], b_part[local] if name == "rows" else b_part[rows_part]
        ):
            return False
    return True


def all_cases(
    cases: dict[str, tuple[dict[str, str], str, dict[str, Any] | None]], device: str = "cpu"
) -> dict[str, Any]:
    """What `compare` finds for each case, on CPUs or with a GPU for each rank."""
    with joined(rank_device(torch.device(device)), Monitor().watch, slow_s=30, timeout_s=60):
        return {name: compare(device, *case) for name, case in cases.items()}


def all_cases_on_gpus(cases: dict[str, Any], hidden: int, width: int) -> dict[str, Any]:
    """The same on GPUs, with sizes that their grouped products take."""
    global H, WIDTH
    H, WIDTH = hidden, width
    return all_cases(cases, "cuda")
