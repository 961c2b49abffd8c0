"""Training speed of the preset `small` on one GPU, against transformers' class and a plain MoE.

    python benchmarks/pretrain_cuda.py --sides yardstick bf16 inkling hopper [--graph | --compile]

Random tokens, FP32 masters, BF16 activations, fused AdamW; one optimiser step a batch, median of the steps
after `--warmup`. Sides: `yardstick` is a plain MoE of the same size (RMSNorm, flash attention of torch,
`F.grouped_mm`, sorted dispatch), compiled; `transformers` its own Inkling2 class, compiled; any other word is
a recipe on Nybble's model. MFU counts 6 operations a token and parameter that takes part in a product, and
attention, against the dense BF16 peak of an H100 or H200, 989 TFLOP/s.
"""

import dataclasses
import gc
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from nybble.layers import convert, refresh, set_step
from nybble.models import Inkling2ForCausalLM, presets
from nybble.pretrain.captured import Captured
from nybble.pretrain.flops import model_flops
from nybble.recipes import load_recipe

PEAK_BF16 = 989e12


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which sides, and how much of each."""

    sides: tuple[str, ...] = ("yardstick", "transformers", "bf16", "inkling", "hopper")
    batch: int = 16
    sequence: int = 1024
    steps: int = 12
    warmup: int = 4
    compile: bool = False
    """Compile Nybble's model whole; the other sides always are."""
    graph: bool = False
    """Launch a step as a CUDA graph, as `nybble pretrain --graph`."""
    keep_activations: bool = False
    """Keep gate and up of experts rather than compute them again, as `nybble pretrain --keep-activations`."""
    profile: Path | None = None
    """Write the kernels of one step of each side, by time, to files in this folder."""
    json: Path | None = None


class PlainAttention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, hidden: int, heads: int, key_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, size
        self.qkv = nn.Linear(hidden, (heads + 2 * key_heads) * size, bias=False)
        self.out = nn.Linear(heads * size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        widths = [n * self.size for n in (self.heads, self.key_heads, self.key_heads)]
        q, k, v = (
            t.view(B, S, -1, self.size).transpose(1, 2)
            for t in F.linear(x, self.qkv.weight.to(x.dtype)).split(widths, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(-2), self.out.weight.to(x.dtype))


class PlainExperts(nn.Module):
    """SwiGLU experts by grouped products over sorted rows."""

    def __init__(self, hidden: int, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.gate(x.float()))
        weights, experts = torch.topk(scores, self.k, dim=-1)
        flat = experts.reshape(-1)
        ordered, order = torch.sort(flat, stable=True)
        each = torch.arange(self.up.shape[0], device=x.device)
        ends = torch.searchsorted(ordered, each, right=True).to(torch.int32)
        rows = x[order // self.k]
        gate, up = F.grouped_mm(rows, self.up.to(x.dtype).transpose(1, 2), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.to(x.dtype).transpose(1, 2), offs=ends)
        out = out * weights.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // self.k, out)


class PlainMoE(nn.Module):
    """The yardstick."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.RMSNorm(hidden),
                    "attention": PlainAttention(
                        hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim
                    ),
                    "norm2": nn.RMSNorm(hidden),
                    "experts": PlainExperts(
                        hidden,
                        config.moe_intermediate_size,
                        config.n_routed_experts,
                        config.num_experts_per_tok,
                    ),
                }
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).bfloat16()
        for layer in self.layers:
            x = x + layer["attention"](layer["norm1"](x.float()).bfloat16())
            y = layer["norm2"](x.float()).bfloat16()
            x = x + layer["experts"](y.flatten(0, 1)).view(x.shape)
        x = self.norm(x.float()).bfloat16()
        logits = F.linear(x, self.head.weight.bfloat16()).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Side:
    """A model with its way to a loss."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.quantised = name, name not in ("yardstick", "transformers")
        self.compiled = config.compile or not self.quantised
        shape = presets.get("small").model_config()
        torch.manual_seed(0)
        if name == "yardstick":
            self.model: Any = PlainMoE(shape).cuda()
        elif name == "transformers":
            from transformers.models.inkling2 import modeling_inkling2

            self.model = modeling_inkling2.Inkling2ForCausalLM(shape).cuda()
        else:
            self.model = Inkling2ForCausalLM(shape).cuda()
            recipe = load_recipe(name)
            convert(self.model, replace(recipe, keep="activations") if config.keep_activations else recipe)
        self.flops = model_flops(
            Inkling2ForCausalLM(shape) if not self.quantised else self.model, config.sequence
        )
        if self.compiled:
            self.model.compile()
        self.captured: Captured | None = None
        if config.graph and self.quantised:
            self.captured = Captured(self.model, self._of, partial(set_step, self.model))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """Of one batch."""
        if self.name == "yardstick":
            return self.model(ids, labels)
        if self.name == "transformers":
            with torch.autocast("cuda", torch.bfloat16):
                return self.model(input_ids=ids, labels=ids).loss
        set_step(self.model, step, 0)
        if self.compiled:
            refresh(self.model)
        return self.model(ids, shift_labels=labels).loss

    def _of(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["ids"], shift_labels=batch["labels"]).loss

    def step(self, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """Forward, backward, update; the loss before it."""
        if self.captured is not None:
            loss = self.captured([{"ids": ids, "labels": labels}], step)
        else:
            loss = self.loss(ids, labels, step)
            loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()


def measure(name: str, config: Config) -> dict[str, Any]:
    """Tokens a second, MFU and peak memory of one side."""
    torch.cuda.reset_peak_memory_stats()
    side = Side(name, config)
    vocabulary = presets.get("small").vocabulary
    ids = torch.randint(vocabulary, (config.batch, config.sequence), device="cuda")
    labels = torch.randint(vocabulary, (config.batch, config.sequence), device="cuda")
    start = time.perf_counter()
    times = []
    for step in range(config.warmup + config.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = side.step(ids, labels, step)
        end.record()
        torch.cuda.synchronize()
        if step == 0:
            first_s = time.perf_counter() - start
        if step >= config.warmup:
            times.append(begin.elapsed_time(end))
    ms = sorted(times)[len(times) // 2]
    tokens = config.batch * config.sequence
    if config.profile is not None:
        write_profile(lambda: side.step(ids, labels, 1), config.profile / f"profile-{name}.txt")
    return {
        "side": name + (", compiled" if side.compiled else ", graph" if side.captured else ""),
        "ms": ms,
        "tokens_per_s": tokens / ms * 1e3,
        "mfu": side.flops * tokens / ms * 1e3 / PEAK_BF16,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": first_s,
        "loss": float(loss),
    }


def write_profile(step: Any, path: Path) -> None:
    """The kernels of one step, longest first."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        acc_events=True,
    ) as profile:
        begin = time.perf_counter()
        step()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    lines = [f"host {host * 1e3:.1f} ms, device {total / 1e3:.1f} ms"]
    lines += [f"{e.self_device_time_total:10.0f} us {e.count:5d} x  {e.key[:120]}" for e in events[:80]]
    path.write_text("\n".join(lines) + "\n")


def main(config: Config) -> None:
    """Measure every side and print a table."""
    size = f"{config.batch} x {config.sequence} tokens"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size}")
    print("| side | ms a step | tokens/s | MFU of BF16 peak | peak GiB | first step, s | last loss |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for name in config.sides:
        row = measure(name, config)
        rows.append(row)
        print(
            f"| {row['side']} | {row['ms']:.1f} | {row['tokens_per_s']:.0f} | {row['mfu']:.1%} | "
            f"{row['peak_gib']:.1f} | {row['first_step_s']:.1f} | {row['loss']:.3f} |",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()
        if not config.graph:
            torch._dynamo.reset()
    if config.json is not None:
        config.json.write_text(
            json.dumps({"config": dataclasses.asdict(config), "rows": rows}, indent=1, default=str)
        )


if __name__ == "__main__":
    main(tyro.cli(Config))
