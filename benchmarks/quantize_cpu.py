"""Claim: on two cores NVFP4 quantises at 20 times torchao's eager `nvfp4_quantize`, MXFP8 at 4 times `to_mx`.

    python benchmarks/quantize_cpu.py [--rows 2048] [--cols 2048] [--dtype fp32] [--rounds 9] [--threads 2]

torchao is not a dependency: `pip install torchao==0.18.0 --no-deps`; without it only Nybble's side is timed.
All calls take turns within each round, in another order each time, so that they meet the same machine and
the same caches; ratios are medians of the rounds' ratios. torchao's call has no outer scale, so Nybble does
more work for its ratio.
"""

import argparse
import contextlib
import io
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import nybble.kernels  # noqa: F401  (registers the fast kernels)

OPS = torch.ops.nybble
Call = Callable[[], object]
TARGETS = {
    "quantize nvfp4, one outer scale": ("torchao nvfp4_quantize", 20.0),
    "quantize mxfp8": ("torchao to_mx", 4.0),
}


def our_calls(x: Tensor) -> dict[str, Call]:
    """Nybble's operations on x [T, K], named by what they do."""
    rows, cols = x.shape
    key = torch.tensor([1, 2, 0])
    f32 = torch.float32
    offs = torch.tensor([rows // 5, rows // 2, rows // 2, rows], dtype=torch.int32)
    nvfp4 = OPS.quantize(x, "nvfp4", outer="row")
    mxfp8 = OPS.quantize(x, "mxfp8")
    weights = torch.randn(8, rows // 8, cols)
    held = OPS.quantize(weights, "nvfp4", outer="matrix")
    sr = {"rounding": "stochastic", "key": key}
    return {
        "quantize nvfp4, one outer scale": lambda: OPS.quantize(x, "nvfp4"),
        "quantize nvfp4, a scale a token": lambda: OPS.quantize(x, "nvfp4", outer="row"),
        "quantize nvfp4, stochastic": lambda: OPS.quantize(x, "nvfp4", outer="row", **sr),
        "quantize nvfp4-4over6": lambda: OPS.quantize(x, "nvfp4-4over6", outer="row"),
        "quantize mxfp8": lambda: OPS.quantize(x, "mxfp8"),
        "quantize mxfp8, stochastic": lambda: OPS.quantize(x, "mxfp8", **sr),
        "quantize mxfp8 along tokens": lambda: OPS.quantize(x, "mxfp8", -2),
        "fake nvfp4, a scale a token": lambda: OPS.fake_quantize(x, "nvfp4", f32, outer="row"),
        "fake nvfp4 of 8 experts": lambda: OPS.fake_quantize(weights, "nvfp4", f32, outer="matrix"),
        "fake mxfp8": lambda: OPS.fake_quantize(x, "mxfp8", f32),
        "fake mxfp8, stochastic": lambda: OPS.fake_quantize(x, "mxfp8", f32, **sr),
        "fake mxfp8 along tokens, groups": lambda: OPS.fake_quantize(x, "mxfp8", f32, -2, offs=offs),
        "nvfp4 to fake mxfp8 along tokens, groups, stochastic": lambda: OPS.fake_requantize(
            *nvfp4, "nvfp4", -1, "row", x.shape, "mxfp8", -2, f32, offs=offs, **sr
        ),
        "nvfp4 to fake mxfp8 of 8 experts along N, stochastic": lambda: OPS.fake_requantize(
            *held, "nvfp4", -1, "matrix", weights.shape, "mxfp8", -2, f32, **sr
        ),
        "dequantize nvfp4": lambda: OPS.dequantize(*nvfp4, "nvfp4", -1, x.shape, f32, "row"),
        "dequantize mxfp8": lambda: OPS.dequantize(*mxfp8, "mxfp8", -1, x.shape, f32),
    }


def peer_calls(x: Tensor) -> dict[str, Call]:
    """torchao's eager quantisers, or nothing where it is not installed."""
    try:
        # Its import reports on standard error that it was built for other devices.
        with contextlib.redirect_stderr(io.StringIO()):
            logging.disable(logging.WARNING)
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import to_mx
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        print("torchao is not installed (pip install torchao==0.18.0 --no-deps): no ratios", file=sys.stderr)
        return {}
    finally:
        logging.disable(logging.NOTSET)
    rceil = ScaleCalculationMode.RCEIL
    return {
        "torchao nvfp4_quantize": lambda: nvfp4_quantize(x),
        "torchao to_mx": lambda: to_mx(x, torch.float8_e4m3fn, 32, rceil),
    }


def time_all(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round that compiles and warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls.items())
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print a table and, against torchao, whether the claim holds; exit 1 where it does not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    x = torch.randn(arguments.rows, arguments.cols)
    x = x if arguments.dtype == "fp32" else x.bfloat16()
    target = torch.empty_like(x)
    peers = peer_calls(x)
    calls = {"copy": lambda: target.copy_(x), **our_calls(x), **peers}
    start = time.perf_counter()
    for call in calls.values():
        call()
    print(f"first calls, with compiling where no cache was: {time.perf_counter() - start:.1f} s")
    seconds = time_all(calls, arguments.rounds)
    size = f"{arguments.rows} x {arguments.cols} {arguments.dtype}"
    print(f"{size}, {arguments.threads} threads, {arguments.rounds} rounds, medians")
    print(f"{'':54}{'ms':>9}{'M values/s':>12}{'of copy':>9}{'x nvfp4_quantize':>18}{'x to_mx':>9}")

    def ratio(name: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    for name, spent in seconds.items():
        median = statistics.median(spent)
        speed = x.numel() / median / 1e6
        columns = f"{name:54}{median * 1e3:9.2f}{speed:12.0f}{ratio(name, 'copy'):9.2f}"
        print(
            columns
            + "".join(f"{ratio(name, peer):{width}.1f}" for peer, width in zip(peers, (18, 9), strict=False))
        )
    held = True
    for name, (peer, least) in TARGETS.items() if peers else ():
        reached = ratio(name, peer)
        held &= reached >= least
        print(f"{name}: {reached:.1f} times {peer}, at least {least:.0f} claimed")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
