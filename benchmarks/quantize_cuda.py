"""The ladder of the CUDA quantisers: bytes counted, time, share of the copy ceiling measured in the same run.

    python benchmarks/quantize_cuda.py [--rows 16384] [--cols 8192] [--json out.json]

A row counts the fewest bytes that its operation must move: inputs once (twice where an amax of all values
must be known before rounding starts), outputs once. torchao, where installed, runs compiled beside it.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from triton.testing import do_bench, do_bench_cudagraph

from nybble.formats import ops, philox
from nybble.kernels import can_run
from nybble.kernels.cuda import launch_both

NVFP4_BYTES, MXFP8_BYTES = 0.5 + 1 / 16, 1 + 1 / 32


@dataclass
class Row:
    """One line of the ladder."""

    name: str
    bytes_per_value: float
    ms: float = 0.0
    tb_per_s: float = 0.0
    share_of_copy: float = 0.0
    host_us: float = 0.0


def median_ms(f: Callable[[], object]) -> float:
    """Of replays of a captured graph: the GPU's time alone. Inputs exceed the L2 cache."""
    return do_bench_cudagraph(f, rep=30, return_mode="median")


def host_us(f: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of the host for one call, while the GPU is kept busy by those before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls * 1e6


def copy_ceiling() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 2 GiB."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    # Not in a graph: there a copy becomes a node that the copy engines run, at two thirds of the speed.
    return 2 * a.numel() / do_bench(lambda: b.copy_(a), return_mode="median") * 1e3


def ladder(rows: int, cols: int, experts: int) -> list[tuple[Row, Callable[[], object]]]:
    """Rows and what they time, on BF16 [rows, cols]."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    key = philox.Key(seed=1, step=2).tensor("cuda")
    sr = {"rounding": "stochastic", "key": key, "layer": 1, "operand": 5}
    codes, scales, amax = ops.quantize(x, "nvfp4", -1, outer="row")
    offs = torch.linspace(0, rows, experts + 1, device="cuda")[1:].round().to(torch.int32)
    shape, bf16 = list(x.shape), torch.bfloat16
    q, fq = ops.quantize, ops.fake_quantize
    weight = torch.randn(rows, cols, device="cuda")

    def requantize(**named: object) -> object:
        return ops.requantize(codes, scales, amax, "nvfp4", -1, "row", shape, "mxfp8", -2, **named)

    def fake_requantize(**named: object) -> object:
        return ops.fake_requantize(codes, scales, amax, "nvfp4", -1, "row", shape, "mxfp8", -2, bf16, **named)

    return [
        (Row("nvfp4 quantize, outer row", 2 + NVFP4_BYTES), lambda: q(x, "nvfp4", outer="row")),
        (
            Row("nvfp4 quantize, outer row, stochastic", 2 + NVFP4_BYTES),
            lambda: q(x, "nvfp4", outer="row", **sr),
        ),
        (Row("nvfp4 quantize, outer tensor (two reads)", 4 + NVFP4_BYTES), lambda: q(x, "nvfp4")),
        (
            Row("nvfp4 quantize, outer tensor, stochastic (two reads)", 4 + NVFP4_BYTES),
            lambda: q(x, "nvfp4", **sr),
        ),
        (
            Row("nvfp4 quantize of FP32, outer matrix (two reads)", 8 + NVFP4_BYTES),
            lambda: q(weight, "nvfp4", outer="matrix"),
        ),
        (Row("nvfp4-16x16 quantize (two reads)", 4.5 + 1 / 256), lambda: q(x, "nvfp4-16x16")),
        (Row("nvfp4-4over6 quantize, outer row", 2 + NVFP4_BYTES), lambda: q(x, "nvfp4-4over6", outer="row")),
        (Row("nvfp4 quantize-dequantize, outer row", 4), lambda: fq(x, "nvfp4", bf16, outer="row")),
        (
            Row("nvfp4 quantize-dequantize, outer row, stochastic", 4),
            lambda: fq(x, "nvfp4", bf16, outer="row", **sr),
        ),
        (Row("mxfp8 quantize", 2 + MXFP8_BYTES), lambda: q(x, "mxfp8")),
        (Row("mxfp8 quantize, stochastic", 2 + MXFP8_BYTES), lambda: q(x, "mxfp8", **sr)),
        (Row("mxfp4 quantize", 2 + 0.5 + 1 / 32), lambda: q(x, "mxfp4")),
        (Row("mxfp8 quantize-dequantize", 4), lambda: fq(x, "mxfp8", bf16)),
        (Row("fp8-row quantize", 3), lambda: q(x, "fp8-row")),
        (Row("fp8-1x128 quantize", 3 + 1 / 32), lambda: q(x, "fp8-1x128")),
        (Row("fp8-128x128 quantize", 3), lambda: q(x, "fp8-128x128")),
        (Row("mxfp8 quantize along tokens", 2 + MXFP8_BYTES), lambda: q(x, "mxfp8", -2)),
        (Row("mxfp8 quantize along tokens, stochastic", 2 + MXFP8_BYTES), lambda: q(x, "mxfp8", -2, **sr)),
        (Row("mxfp8 quantize along tokens, grouped", 2 + MXFP8_BYTES), lambda: q(x, "mxfp8", -2, offs=offs)),
        (Row("mxfp8 quantize-dequantize along tokens", 4), lambda: fq(x, "mxfp8", bf16, -2)),
        (
            Row("mxfp8 quantize-dequantize along both axes", 6),
            lambda: launch_both.fake_quantize_both(x, "mxfp8", bf16),
        ),
        (Row("nvfp4 codes -> mxfp8 along tokens", NVFP4_BYTES + MXFP8_BYTES), lambda: requantize()),
        (
            Row("nvfp4 codes -> mxfp8 along tokens, stochastic", NVFP4_BYTES + MXFP8_BYTES),
            lambda: requantize(**sr),
        ),
        (
            Row("nvfp4 codes -> mxfp8 along tokens, stochastic, grouped", NVFP4_BYTES + MXFP8_BYTES),
            lambda: requantize(offs=offs, **sr),
        ),
        (
            Row("nvfp4 codes -> mxfp8 values along tokens, stochastic", NVFP4_BYTES + 2),
            lambda: fake_requantize(**sr),
        ),
        (
            Row("nvfp4 dequantize to BF16", NVFP4_BYTES + 2),
            lambda: ops.dequantize(codes, scales, amax, "nvfp4", -1, shape, bf16, "row", False),
        ),
    ]


def torchao_rows(rows: int, cols: int) -> list[tuple[Row, Callable[[], object]]]:
    """torchao's compiled quantisers on the same tensor; none where it is not installed."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError:
        return []
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    nvfp4 = torch.compile(nvfp4_quantize)
    mxfp8 = torch.compile(lambda t: to_mx(t, torch.float8_e4m3fn, 32))
    return [
        (Row("torchao nvfp4_quantize, compiled", 2 + NVFP4_BYTES), lambda: nvfp4(x)),
        (Row("torchao to_mx e4m3, compiled", 2 + MXFP8_BYTES), lambda: mxfp8(x)),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--json", default=None, help="also write the rows to this file")
    args = parser.parse_args()
    reason = can_run("cuda", "nvfp4")
    if reason is not None:
        raise SystemExit(f"no CUDA quantisers: {reason}")
    copy = copy_ceiling()
    values = args.rows * args.cols
    print(f"{torch.cuda.get_device_name()}, BF16 [{args.rows}, {args.cols}], copy {copy / 1e12:.2f} TB/s")
    print(f"{'':58s} {'ms':>8s} {'TB/s':>6s} {'of copy':>8s} {'host us':>8s}")
    done = []
    for row, f in ladder(args.rows, args.cols, args.experts) + torchao_rows(args.rows, args.cols):
        row.ms = median_ms(f)
        row.tb_per_s = row.bytes_per_value * values / row.ms / 1e9
        row.share_of_copy = row.tb_per_s * 1e12 / copy
        row.host_us = host_us(f)
        print(
            f"{row.name:58s} {row.ms:8.4f} {row.tb_per_s:6.2f} {row.share_of_copy:8.1%} {row.host_us:8.0f}",
            flush=True,
        )
        done.append(asdict(row))
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"device": torch.cuda.get_device_name(), "copy": copy, "rows": done}, out, indent=1)


if __name__ == "__main__":
    main()
