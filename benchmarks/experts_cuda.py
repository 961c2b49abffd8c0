"""Experts, forward and backward, on one GPU: recipes against BF16 `F.grouped_mm`, both sides in one run.

    python benchmarks/experts_cuda.py --recipes inkling inkling:activations

32768 tokens, 2048 -> 2048 -> 2048 with gates (the up product is 2048 -> 4096), 16 experts, one a token.
`micro` counts forward and backward passes over which quantised weights are used again. Medians of CUDA
events, of calls as they are and of the same passes captured as CUDA graphs, which leave out what the host
takes, as `nybble pretrain --graph` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import nybble
from nybble.layers import set_step


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the layer and what to time."""

    tokens: int = 32768
    hidden: int = 2048
    width: int = 2048
    experts: int = 16
    recipes: tuple[str, ...] = (
        "bf16",
        "mxfp8",
        "inkling",
        "inkling:activations",
        "hopper",
        "hopper:activations",
    )
    compiled: bool = True
    """Also compile the baseline, which fuses its elementwise passes."""
    micro: tuple[int, ...] = (1, 4)
    rounds: int = 10


class FusedExperts(nn.Module):
    """The layer in transformers' form, computed by BF16 `F.grouped_mm` and autograd."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        E, H, width = config.experts, config.hidden, config.width
        self.num_experts = E
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * width, H, device="cuda") * 0.02)
        self.down_proj = nn.Parameter(torch.randn(E, H, width, device="cuda") * 0.02)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ordered, order = torch.sort(index.reshape(-1), stable=True)
        each = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(ordered, each, right=True).int()
        gate_up = F.grouped_mm(x[order], self.gate_up_proj.bfloat16().transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        out = F.grouped_mm(self.act_fn(gate) * up, self.down_proj.bfloat16().transpose(1, 2), offs=ends)
        y = torch.empty_like(out)
        y[order] = out
        return y * weights.to(y.dtype)


class Side:
    """One layer with what goes through it."""

    def __init__(self, name: str, config: Config) -> None:
        torch.manual_seed(0)
        T, H = config.tokens, config.hidden
        self.model = nn.Sequential(FusedExperts(config))
        self.quantised = not name.startswith("grouped_mm")
        if self.quantised:
            nybble.convert(self.model, experts_only(name))
        elif name != "grouped_mm":
            self.model[0].compile()
        self.x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.index = torch.randint(config.experts, (T, 1), device="cuda")
        self.weights = torch.rand(T, 1, device="cuda", requires_grad=True)
        self.dy = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)

    def announce(self, micro: int) -> None:
        """Weights are quantised in micro-batch 0 and kept for the others."""
        if self.quantised:
            set_step(self.model, 0, micro)

    def once(self) -> None:
        """Forward and backward; gradients are added to those that are there."""
        self.model[0](self.x, self.index, self.weights).backward(self.dy)

    def clear(self) -> None:
        """Forget the gradients."""
        for leaf in (self.x, self.weights, *self.model.parameters()):
            leaf.grad = None

    def eager(self, micro: int) -> Callable[[], None]:
        """A step of `micro` micro-batches, one kernel after the other."""

        def step() -> None:
            for i in range(micro):
                self.announce(i)
                self.once()
            self.clear()

        return step

    def captured(self, micro: int) -> Callable[[], None]:
        """The same as graphs: one of the first micro-batch, one of any other."""
        self.clear()
        graphs: list[torch.cuda.CUDAGraph] = []
        for i in range(min(micro, 2)):
            self.announce(i)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
                self.once()
            graphs.append(graph)

        def step() -> None:
            for i in range(micro):
                graphs[min(i, 1)].replay()

        return step


STEPS = 5
"""Steps between two looks at the clock: as in training, the host may be ahead of the GPU."""


def milliseconds(step: Callable[[], None], rounds: int) -> float:
    """Median time of `step`, STEPS in a row, after three rounds of warm-up."""
    times = []
    for i in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / STEPS)
    return sorted(times)[len(times) // 2]


def main(config: Config) -> None:
    """Time every recipe and print a table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds a micro-batch")
    print("| layer | micro | ms | to grouped_mm | ms, graph | to grouped_mm | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    base: dict[int, tuple[float, float]] = {}
    for name in ("grouped_mm", *(("grouped_mm, compiled",) if config.compiled else ()), *config.recipes):
        side = Side(name, config)
        for micro in config.micro:
            torch.cuda.reset_peak_memory_stats()
            ms = milliseconds(side.eager(micro), config.rounds) / micro
            peak = torch.cuda.max_memory_allocated() / 2**30
            graph_ms = milliseconds(side.captured(micro), config.rounds) / micro
            side.clear()
            first = base.setdefault(micro, (ms, graph_ms))
            print(
                f"| {name} | {micro} | {ms:.3f} | {ms / first[0]:.2f} | {graph_ms:.3f} | "
                f"{graph_ms / first[1]:.2f} | {peak:.2f} |",
                flush=True,
            )


def experts_only(name: str) -> dict[str, Any]:
    """What a built-in recipe says of experts, for every layer; NAME:activations keeps gate and up."""
    name, _, keep = name.partition(":")
    recipe = nybble.load_recipe(name).to_dict()
    rules = [rule for rule in recipe["rule"] if rule.get("kind") != "linear" and "layers" not in rule]
    chosen = {"rule": [rule | {"modules": "**", "kind": "experts"} for rule in rules]}
    return recipe | chosen | ({"experts": {"keep": keep}} if keep else {})


if __name__ == "__main__":
    main(tyro.cli(Config))
