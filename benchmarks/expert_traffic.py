"""What traffic between ranks that share experts costs: bytes, packing, and a step over a slow link.

    python benchmarks/expert_traffic.py link       # Linux, root: a network namespace with a rate limit
    python benchmarks/expert_traffic.py kernels    # one CUDA device

`link` starts two ranks (gloo, CPU, a core each) whose loopback is limited to a rate and runs one layer of
experts forward and backward with each choice of legs; bytes are those of the buffers that left a rank.
`kernels` times packing and unpacking as shares of the bandwidth of a copy; a row counts each byte once that
the operation must read or write.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from nybble.formats import philox
from nybble.kernels import messages
from nybble.recipes import LEGS


@dataclass(frozen=True, kw_only=True)
class Link:
    """A step of one layer over a slow link."""

    megabit: tuple[int, ...] = (50, 100, 200)
    """Rates of the link, both directions together."""
    tokens: int = 1024
    """Of each rank."""
    hidden: int = 1024
    width: int = 32
    """Of an expert: small, so that the wire is what counts."""
    experts: int = 8
    chosen: int = 2
    steps: int = 5


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Packing and unpacking on a GPU."""

    rows: int = 32768
    hidden: int = 4608
    json: str = ""
    """File to write the figures to."""


class Experts(nn.Module):
    def __init__(self, config: Link) -> None:
        super().__init__()
        torch.manual_seed(0)
        E, H, width = config.experts, config.hidden, config.width
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * width, H) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(E, H, width) * 0.02)
        self.act_fn = nn.SiLU()


CHOICES: dict[str, dict[str, str]] = {
    "bf16": {},
    "combine mxfp8": {"combine": "mxfp8"},
    "all mxfp8": dict.fromkeys(LEGS, "mxfp8"),
    "all nvfp4": dict.fromkeys(LEGS, "nvfp4"),
}


def rank(config: Link) -> None:
    """One of the two ranks; prints a line of JSON on rank 0."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from nybble.layers import set_step
    from nybble.parallel import Monitor, convert
    from nybble.parallel.launch import joined

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    found: dict[str, Any] = {}
    monitor = Monitor()
    with joined(torch.device("cpu"), monitor.watch, slow_s=60, timeout_s=300):
        torch.manual_seed(dist.get_rank())
        x = torch.randn(config.tokens, config.hidden)
        index = torch.rand(config.tokens, config.experts).argsort(1)[:, : config.chosen]
        weights, dy = torch.rand(config.tokens, config.chosen), torch.randn_like(x)
        for name, legs in CHOICES.items():
            model = nn.Module()
            model.experts = Experts(config)
            recipe = {"rule": [{"modules": "**", "all": "mxfp8"}], "traffic": legs}
            convert(model, recipe, mesh=init_device_mesh("cpu", (2,)), monitor=monitor)

            def forward(step: int, model: nn.Module = model) -> tuple[Tensor, Tensor]:
                set_step(model, step)
                inputs = x.clone().requires_grad_()
                return inputs, model.experts(inputs, index, weights)

            times: dict[str, list[float]] = {"forward": [], "step": []}
            for step in range(config.steps + 1):
                monitor.meter.take()
                dist.barrier()
                started = time.perf_counter()
                _, y = forward(step)
                dist.barrier()
                times["forward"].append(time.perf_counter() - started)
                y.backward(dy)
                dist.barrier()
                times["step"].append(time.perf_counter() - started)
            counted, waited = monitor.meter.take()
            medians = {what: sorted(each[1:])[config.steps // 2] for what, each in times.items()}
            found[name] = {"bytes": counted, "waited": waited, **medians}
        if dist.get_rank() == 0:
            sys.stderr.write(json.dumps(found) + "\n")


def link(config: Link) -> None:
    """Both ranks in a network namespace of their own, and the table of each rate."""
    if shutil.which("unshare") is None or shutil.which("tc") is None or os.geteuid() != 0:
        sys.exit("link needs Linux, root, unshare and tc")
    for rate in config.megabit:
        _table(config, rate, _limited(config, rate))


def _limited(config: Link, rate: int) -> dict[str, Any]:
    """What rank 0 found over a link of `rate` Mbit/s."""
    words = [f"--{k}={v}" for k, v in vars(config).items() if k != "megabit"]
    ranks = " & ".join(f"RANK={r} {sys.executable} {__file__} rank {' '.join(words)}" for r in range(2))
    script = (
        "ip link set lo up && "
        f"tc qdisc add dev lo root tbf rate {rate}mbit burst 128kb latency 400ms && "
        f"{{ {ranks} & wait; }}"
    )
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script], env=environment, capture_output=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"the ranks failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def _table(config: Link, rate: int, found: dict[str, Any]) -> None:
    base = found["bf16"]
    print(f"two ranks over {rate} Mbit/s, {config.tokens} tokens each, hidden size {config.hidden}")
    print("| legs | bytes of dispatch | of combine | to bf16 | forward, s | faster | step, s | faster |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in found.items():
        count = row["bytes"]
        share = sum(count[leg] for leg in LEGS) / sum(base["bytes"][leg] for leg in LEGS)
        print(
            f"| {name} | {count['dispatch']} | {count['combine']} | {share:.3f} | {row['forward']:.3f} "
            f"| {base['forward'] / row['forward']:.2f} | {row['step']:.3f} "
            f"| {base['step'] / row['step']:.2f} |",
            flush=True,
        )


def seconds(f: Callable[[], object]) -> float:
    """Median time of replays of a captured graph: the GPU's time alone. Inputs exceed its caches."""
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(f, rep=30, return_mode="median") / 1e3


def copy_ceiling() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 2 GiB."""
    from triton.testing import do_bench

    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    # Not in a graph: there a copy becomes a node that the copy engines run, at two thirds of the speed.
    return 2 * a.numel() / do_bench(lambda: b.copy_(a), return_mode="median") * 1e3


def kernels(config: Kernels) -> None:
    """The table of packing and unpacking."""
    copy = copy_ceiling()
    R, H = config.rows, config.hidden
    x = torch.randn(R, H, device="cuda", dtype=torch.bfloat16)
    key = philox.Key(seed=1, step=2).tensor("cuda")
    rows = torch.arange(R, device="cuda")
    # Two rows of the message for each result, as for experts on two ranks.
    places = torch.randperm(R, device="cuda", dtype=torch.int32).view(-1, 2)
    table = {"copy, TB/s": copy / 1e12}
    for name in ("mxfp8", "nvfp4"):
        B = messages.row_bytes(name, H)
        message = messages.pack(x, name)
        timed: dict[str, tuple[int, Callable[[], object]]] = {
            "pack": (R * (2 * H + B), lambda name=name: messages.pack(x, name)),
            "pack, stochastic": (
                R * (2 * H + B),
                lambda name=name: messages.pack(x, name, "stochastic", key, 1, 17, rows),
            ),
            "unpack": (R * (B + 2 * H), lambda m=message, n=name: messages.unpack(m, n, H, torch.bfloat16)),
            "unpack, sums of two": (
                R * B + R // 2 * 2 * H,
                lambda m=message, n=name: messages.unpack(m, n, H, torch.bfloat16, places),
            ),
            "gather by token": (
                2 * R * B,
                lambda m=message: messages.take_rows(m, places.view(-1)),
            ),
        }
        for what, (moved, f) in timed.items():
            table[f"{name} {what}"] = moved / seconds(f) / copy
    print(
        f"{torch.cuda.get_device_name()}, BF16 {R} x {H}, torch {torch.__version__}; shares of copy bandwidth"
    )
    for what, share in table.items():
        print(f"| {what} | {share:.3f} |")
    if config.json:
        with open(config.json, "w", encoding="utf-8") as file:
            json.dump(table, file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(tyro.cli(Link, args=sys.argv[2:]))
    else:
        chosen = tyro.cli(
            Annotated[Link, tyro.conf.subcommand("link")]
            | Annotated[Kernels, tyro.conf.subcommand("kernels")]
        )
        link(chosen) if isinstance(chosen, Link) else kernels(chosen)
