"""Experts, forward and backward, on one GPU: recipes against BF16 `F.grouped_mm`, both sides in one run.

    python benchmarks/experts_cuda.py --recipes inkling inkling:activations

32768 tokens, 2048 -> 2048 -> 2048 with gates (the up product is 2048 -> 4096), 16 experts, one a token.
`micro` counts forward and backward passes over which quantised weights are used again. Medians of CUDA
events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import nybble
from nybble.layers import refresh, set_step


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
        order = torch.argsort(index.reshape(-1), stable=True)
        ends = torch.cumsum(torch.bincount(index.reshape(-1), minlength=self.num_experts), 0).int()
        gate_up = F.grouped_mm(x[order], self.gate_up_proj.bfloat16().transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        out = F.grouped_mm(self.act_fn(gate) * up, self.down_proj.bfloat16().transpose(1, 2), offs=ends)
        y = torch.empty_like(out)
        y[order] = out
        return y * weights.to(y.dtype)


def milliseconds(step: Callable[[], None], rounds: int) -> float:
    """Median time of `step` after three warm-ups."""
    times = []
    for i in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main(config: Config) -> None:
    """Time every recipe and print a table."""
    torch.manual_seed(0)
    x = torch.randn(config.tokens, config.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(config.experts, (config.tokens, 1), device="cuda")
    weights = torch.rand(config.tokens, 1, device="cuda", requires_grad=True)
    dy = torch.randn(config.tokens, config.hidden, device="cuda", dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds a micro-batch")
    print("| layer | micro | ms | to grouped_mm | peak GiB |\n|---|---|---|---|---|")
    for micro in config.micro:
        base = 0.0
        for name in ("grouped_mm", *(("grouped_mm, compiled",) if config.compiled else ()), *config.recipes):
            model = nn.Sequential(FusedExperts(config))
            quantised = not name.startswith("grouped_mm")
            if quantised:
                nybble.convert(model, experts_only(name))
            elif name != "grouped_mm":
                model[0].compile()

            def step(model: nn.Sequential = model, micro: int = micro, quantised: bool = quantised) -> None:
                for i in range(micro):
                    if quantised:
                        set_step(model, 0, i)
                        if i == 0:
                            refresh(model)
                    model[0](x, index, weights).backward(dy)
                model.zero_grad()

            torch.cuda.reset_peak_memory_stats()
            ms = milliseconds(step, config.rounds) / micro
            base = base or ms
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"| {name} | {micro} | {ms:.3f} | {ms / base:.2f} | {peak:.2f} |", flush=True)


def experts_only(name: str) -> dict[str, Any]:
    """What a built-in recipe says of experts, for every layer; NAME:activations keeps gate and up."""
    name, _, keep = name.partition(":")
    recipe = nybble.load_recipe(name).to_dict()
    rules = [rule for rule in recipe["rule"] if rule.get("kind") != "linear" and "layers" not in rule]
    chosen = {"rule": [rule | {"modules": "**", "kind": "experts"} for rule in rules]}
    return recipe | chosen | ({"experts": {"keep": keep}} if keep else {})


if __name__ == "__main__":
    main(tyro.cli(Config))
