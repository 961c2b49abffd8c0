"""Attention with a learned relative bias on one GPU: the fused kernels against FlexAttention and flash SDPA.

    python benchmarks/attention_cuda.py [--tiles]

A layer's attention of the preset `small`, 16 x 1024 tokens, sliding and full, BF16, forward and backward.
Flash SDPA computes less: neither bias nor sinks nor a window. `--tiles` times each kernel over tiles. Before
anything is timed, results and gradients are held against `attend_chunks` in FP32.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import tyro
from torch import Tensor

from nybble.models.cuda import attend
from nybble.models.cuda.attend import Tile
from nybble.models.flex import block_mask
from nybble.models.inkling2.attend import attend_chunks
from nybble.models.inkling2.flex import attend_flex
from nybble.models.inkling2.fused import attend_fused


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one layer; those of `small` by default."""

    batch: int = 16
    sequence: int = 1024
    heads: int = 8
    key_heads: int = 4
    size: int = 64
    d_rel: int = 16
    window: int = 256
    extent: int = 1024
    tiles: bool = False
    """Time the kernels one by one over tiles."""
    peers: bool = True
    """Time FlexAttention and SDPA too."""


TILES = [
    Tile(64, 4, 2),
    Tile(64, 4, 2, 168),
    Tile(64, 4, 3),
    Tile(32, 4, 2),
    Tile(32, 2, 2),
]
REPEATS = 10


class Layer:
    """Random inputs of one layer, sliding if it has a window."""

    def __init__(self, config: Config, window: int | None) -> None:
        B, S, H, h, D = config.batch, config.sequence, config.heads, config.key_heads, config.size
        self.window, self.scale = window, D**-0.5
        extent = config.extent if window is None else window
        shapes = [(B, S, H, D), (B, S, h, D), (B, S, h, D), (B, S, H, config.d_rel)]
        shapes += [(config.d_rel, extent), (B, S, H)]
        torch.manual_seed(0)
        dtypes = [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16]
        self.inputs = [
            torch.randn(s, device="cuda", dtype=t).requires_grad_()
            for s, t in zip(shapes, dtypes, strict=True)
        ]
        self.dout = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
        self.mask = block_mask(S, window, None, B, self.dout.device)

    def fused(self) -> Tensor:
        return attend_fused(*self.inputs, window=self.window, scale=self.scale)

    def flex(self) -> Tensor:
        return attend_flex(*self.inputs, scale=self.scale, mask=self.mask)

    def sdpa(self) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.inputs[:3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def gradients(self, attention: Callable[[], Tensor]) -> Callable[[], Any]:
        """The backward pass alone, again and again."""
        out = attention()
        return lambda: torch.autograd.grad(out, self.inputs, self.dout, retain_graph=True, allow_unused=True)

    def check(self) -> None:
        """Print how far results and gradients are from FP32, and that they repeat."""
        some = [x[:2] if x.dim() > 2 else x for x in self.inputs]
        exact = [x.detach().float().requires_grad_() for x in some]
        mine = [x.detach().clone().requires_grad_() for x in some]
        arguments: Any = {"window": self.window, "scale": self.scale}
        expected, got = attend_chunks(*exact, **arguments), attend_fused(*mine, **arguments)
        grads = torch.autograd.grad(expected, exact, self.dout[:2].float())
        own = torch.autograd.grad(got, mine, self.dout[:2], retain_graph=True)
        again = torch.autograd.grad(got, mine, self.dout[:2])
        pairs = zip(
            ("out", "q", "k", "v", "rel", "proj", "sink"), (got, *own), (expected, *grads), strict=True
        )
        errors = {n: float(((g.detach().float() - e).norm() / e.norm()).detach()) for n, g, e in pairs}
        print(
            f"window {self.window}, relative errors: "
            + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
            + f"; repeats: {all(torch.equal(a, b) for a, b in zip(own, again, strict=True))}"
        )
        assert max(errors.values()) < 2e-2


def ms(function: Callable[[], Any], kernel: str | None = None) -> float:
    """Time of one call on the device, or of one kernel of it, without what lies between kernels."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            function()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if kernel is None or e.key == kernel]
    return sum(e.self_device_time_total for e in events) / REPEATS / 1e3


def whole(layers: dict[str, Layer], peers: bool) -> None:
    """The table of the whole op."""
    print("| layer | attention | forward, ms | backward, ms |\n|---|---|---|---|", flush=True)
    for name, layer in layers.items():
        for kind in ("fused", "flex", "sdpa") if peers else ("fused",):
            attention = getattr(layer, kind)
            with torch.no_grad():
                forward = ms(attention)
            print(f"| {name} | {kind} | {forward:.3f} | {ms(layer.gradients(attention)):.3f} |", flush=True)


def by_tile(layers: dict[str, Layer]) -> None:
    """Each kernel over tiles."""
    print("| layer | kernel | tokens, warps, stages, registers | ms |\n|---|---|---|---|", flush=True)
    for (name, layer), tile in itertools.product(layers.items(), TILES):
        inputs = [x.detach() for x in layer.inputs]
        rest = (None, layer.window, layer.scale)
        results = attend.forward(*inputs, *rest)
        kernels = {
            "forward": partial(attend.forward, *inputs, *rest, tile),
            "queries": partial(attend.backward, layer.dout, *results, *inputs, *rest, tile, None),
            "keys": partial(attend.backward, layer.dout, *results, *inputs, *rest, None, tile),
        }
        for kernel, call in kernels.items():
            try:
                time = f"{ms(call, kernel):.3f}"
            except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
                time = str(error)[:60]
            print(f"| {name} | {kernel} | {', '.join(map(str, vars(tile).values()))} | {time} |", flush=True)


def main(config: Config) -> None:
    """Check, then time."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    layers = {"sliding": Layer(config, config.window), "full": Layer(config, None)}
    for layer in layers.values():
        layer.check()
    whole(layers, config.peers)
    if config.tiles:
        by_tile(layers)


if __name__ == "__main__":
    main(tyro.cli(Config))
