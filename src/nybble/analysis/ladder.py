"""The ladder of kernels of a device: what each must move or compute, how long it takes, and how near that is.

A quantiser counts the fewest bytes that it must move: inputs once (twice where an amax of all values must be
known before rounding starts), outputs once. A product counts 2 M N K.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nybble.kernels  # noqa: F401  (registers the fast kernels)
from nybble.analysis import clock
from nybble.analysis.clock import Call, Timed
from nybble.analysis.peers import torchao_calls
from nybble.formats import ops, philox
from nybble.kernels import fused, hopper, streamed

NVFP4_BYTES, MXFP8_BYTES = 0.5 + 1 / 16, 1 + 1 / 32


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One kernel on its inputs."""

    name: str
    call: Call
    bytes: float = 0.0
    """Moved by one call; 0 for products."""
    operations: float = 0.0
    """Of one product; 0 for what is bound by memory."""
    peer: str = ""
    """The call of torchao that does the same."""
    bf16: str = ""
    """The rung that does the same in BF16; none for those of BF16 themselves."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A rung and its time."""

    rung: Rung
    ms: float
    share: float
    """Of the bandwidth of a copy, or of the rate of a matrix product, measured in turns with it."""
    to_bf16: float | None = None
    """Its time over that of its BF16 counterpart."""
    to_torchao: float | None = None
    """Its time over torchao's; None where torchao is not installed or has no such call."""

    @property
    def rate(self) -> float:
        """Bytes or operations a second."""
        return (self.rung.bytes or self.rung.operations) / self.ms * 1e3

    def line(self) -> str:
        """A row of the printed table."""
        unit, scale = ("TB/s", 1e12) if self.rung.bytes else ("TFLOP/s", 1e12)
        if self.rate < 1e12:
            unit, scale = unit.replace("T", "G", 1), 1e9
        ratios = (f"{r:8.2f}" if r is not None else f"{'-':>8}" for r in (self.to_bf16, self.to_torchao))
        return (
            f"{self.rung.name:58}{self.ms:10.4f}{self.rate / scale:9.2f} {unit:8}{self.share:7.1%}"
            + "".join(ratios)
        )


HEAD = f"{'kernel':58}{'ms':>10}{'rate':>9} {'':8}{'share':>7}{'x bf16':>8}{'x ao':>8}"


def climb(
    device: torch.device, rows: int, cols: int, experts: int, tell: Callable[[Measured], None]
) -> list[Measured]:
    """Measure every rung on [rows, cols] and tell of each as it is done."""
    copy, matrix = clock.copy(device), clock.matrix(device)
    x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
    peers = torchao_calls(x)
    compared: dict[str, Timed] = {}
    done: list[Measured] = []
    for rung in itertools.chain(quantisers(x, experts), products(device, rows, cols, experts)):
        ceiling = copy if rung.bytes else matrix
        own = clock.timed(rung.call, device)
        if rung.peer in peers and rung.peer not in compared:
            compared[rung.peer] = clock.timed(peers[rung.peer], device)
        others = {name: compared[name] for name in (rung.bf16, rung.peer) if name in compared}
        ms, ceiling_ms, *rest = clock.in_turns([own, ceiling.timed, *others.values()])
        ratios = {name: ms / other for name, other in zip(others, rest, strict=True)}
        measured = Measured(
            rung=rung,
            ms=ms,
            share=(rung.bytes or rung.operations) / ms / (ceiling.work / ceiling_ms),
            to_bf16=ratios.get(rung.bf16),
            to_torchao=ratios.get(rung.peer),
        )
        if not rung.bf16:
            compared[rung.name] = own
        done.append(measured)
        tell(measured)
    return done


def quantisers(x: Tensor, experts: int) -> Iterator[Rung]:
    """Every quantiser on BF16 x [T, C], made as it is asked for."""
    rows, n = x.shape[0], x.numel()
    # As layers hold it, with the first element that is rounded: without it each call would add one.
    key = torch.nn.functional.pad(philox.Key(seed=1, step=2).tensor(str(x.device)), (0, 1))
    sr = {"rounding": "stochastic", "key": key, "layer": 1, "operand": 5}
    bf16, shape = torch.bfloat16, list(x.shape)
    offs = torch.linspace(0, rows, experts + 1, device=x.device)[1:].round().to(torch.int32)
    q, fake = ops.quantize, ops.fake_quantize
    target, copy = torch.empty_like(x), "bf16 copy"
    yield Rung(name=copy, bytes=4 * n, call=lambda: target.copy_(x))

    def rung(name: str, bytes_a_value: float, call: Call, peer: str = "") -> Rung:
        return Rung(name=name, bytes=bytes_a_value * n, call=call, peer=peer, bf16=copy)

    nv, mx = 2 + NVFP4_BYTES, 2 + MXFP8_BYTES
    ao_nv, ao_mx = "nvfp4_quantize", "to_mx"
    yield rung("nvfp4 quantize, outer row", nv, lambda: q(x, "nvfp4", outer="row"), ao_nv)
    yield rung("nvfp4 quantize, outer row, stochastic", nv, lambda: q(x, "nvfp4", outer="row", **sr))
    yield rung("nvfp4 quantize, outer tensor (two reads)", 2 + nv, lambda: q(x, "nvfp4"), ao_nv)
    yield rung("nvfp4-16x16 quantize (two reads)", 4.5 + 1 / 256, lambda: q(x, "nvfp4-16x16"))
    yield rung("nvfp4-4over6 quantize, outer row", nv, lambda: q(x, "nvfp4-4over6", outer="row"))
    yield rung("nvfp4 quantize-dequantize, outer row", 4, lambda: fake(x, "nvfp4", bf16, outer="row"))
    yield rung("mxfp8 quantize", mx, lambda: q(x, "mxfp8"), ao_mx)
    yield rung("mxfp8 quantize, stochastic", mx, lambda: q(x, "mxfp8", **sr))
    yield rung("mxfp4 quantize", 2.5 + 1 / 32, lambda: q(x, "mxfp4"))
    yield rung("mxfp8 quantize-dequantize", 4, lambda: fake(x, "mxfp8", bf16))
    yield rung("mxfp8 quantize-dequantize along tokens", 4, lambda: fake(x, "mxfp8", bf16, -2))
    yield rung("mxfp8 quantize along tokens, grouped", mx, lambda: q(x, "mxfp8", -2, offs=offs))
    yield rung("fp8-row quantize", 3, lambda: q(x, "fp8-row"))
    yield rung("fp8-1x128 quantize", 3 + 1 / 32, lambda: q(x, "fp8-1x128"))
    yield rung("fp8-128x128 quantize", 3, lambda: q(x, "fp8-128x128"))
    codes = q(x, "nvfp4", outer="row")

    def again(**named: object) -> object:
        return ops.requantize(*codes, "nvfp4", -1, "row", shape, "mxfp8", -2, **named)

    both = NVFP4_BYTES + MXFP8_BYTES
    yield rung("nvfp4 codes -> mxfp8 along tokens", both, lambda: again())
    yield rung("nvfp4 codes -> mxfp8 along tokens, stochastic", both, lambda: again(**sr))
    yield rung("the same, grouped", both, lambda: again(offs=offs, **sr))
    yield rung(
        "nvfp4 dequantize to BF16",
        NVFP4_BYTES + 2,
        lambda: ops.dequantize(*codes, "nvfp4", -1, shape, bf16, "row", False),
    )
    turned = ops.hadamard(x, -2, 128, key, 1, 68)
    eden = ("eden", "tensor", key, 1, 5)
    yield rung("Hadamard transform of 128 along tokens", 6, lambda: ops.hadamard(x, -2, 128, key, 1, 68))
    yield rung(
        "nvfp4 MS-EDEN of that, quantize-dequantize (two reads)",
        10,
        lambda: fake(turned, "nvfp4", bf16, -2, *eden),
    )
    if x.device.type != "cuda":
        return
    whole = ("stochastic", key, 1, 5, None, offs)
    yield rung(
        "nvfp4 codes -> fp8 columns, grouped, stochastic",
        NVFP4_BYTES + 1 / 16 + 1,  # block scales are read twice
        lambda: fused.fp8_columns_of_codes(*codes, "nvfp4", None, *whole),
    )
    rows_of_codes = q(x, "fp8-row")[0]
    yield rung("fp8-row codes as columns, grouped", 2, lambda: fused.transpose_codes(rows_of_codes, offs))
    yield rung(
        "mxfp8 quantize-dequantize along both axes",
        6,
        lambda: fused.gradient_both(x, "mxfp8", None, None, offs),
    )
    wide = torch.cat([x, x], dim=1)
    swiglu = (None, offs, 4.0, 25.0)
    yield rung("SwiGLU, soft-capped", 6, lambda: fused.swiglu_rows(wide, *swiglu))
    yield rung(
        "SwiGLU, soft-capped, to nvfp4 codes and values",
        6 + NVFP4_BYTES,
        lambda: fused.swiglu_quantize(wide, *swiglu, "nvfp4", "nearest", None, 0, 0, None),
    )
    every = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    weights = torch.ones(x.shape[0], device=x.device)
    back: tuple[Any, ...] = (wide, None, x, None, weights, every, *swiglu[1:], [], "nvfp4")
    yield rung("gradient of that", 10, lambda: fused.swiglu_backward(*back, True))
    yield rung(
        "gradient of that, mxfp8 along both axes", 14, lambda: fused.swiglu_backward_both(*back, "mxfp8")
    )


def products(device: torch.device, rows: int, cols: int, experts: int) -> Iterator[Rung]:
    """Products of experts: [rows, C] by [E, C, C] with C = cols / 4; on GPUs also more rows of less width."""
    width = max(cols // 4, 16)
    each = max(rows // experts // 32 * 32, 32)
    if device.type != "cuda":
        a, w = torch.randn(each * experts, width), torch.randn(experts, width, width)
        yield Rung(
            name=f"FP32 products of {experts} experts, {each} x {width} x {width}",
            operations=2.0 * each * experts * width * width,
            call=lambda: torch.bmm(a.view(experts, each, width), w),
        )
        return
    yield from grouped_products(device, each, width, experts)
    yield from grouped_products(device, 2 * each, max(width // 64 * 16, 16), 2 * experts)


def grouped_products(device: torch.device, each: int, width: int, experts: int) -> Iterator[Rung]:
    """Of `each` rows an expert and matrices [width, width], in BF16 and, on Hopper, in FP8."""
    tokens = each * experts
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * each
    a = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    w = torch.randn(experts, width, width, device=device, dtype=torch.bfloat16)
    rows_name, groups_name = (f"bf16 grouped_mm, {what}, {width} wide" for what in ("rows", "contraction"))
    grouped = torch.nn.functional.grouped_mm

    def rung(name: str, call: Call, bf16: str = "") -> Rung:
        return Rung(name=name, operations=2.0 * tokens * width * width, call=call, bf16=bf16)

    yield rung(rows_name, lambda: grouped(a, w.transpose(1, 2), offs=ends))
    yield rung(groups_name, lambda: grouped(a.t(), a, offs=ends))
    if hopper.can_run(device) is not None:
        return
    if width <= streamed.SHORT:
        name = f"bf16 product by rows that stream, {width} wide"
        yield rung(name, lambda: streamed.rows_times(a, w, ends, True), rows_name)
    (x, x_scales, _), (m, m_scales, _) = (ops.quantize(t, "fp8-row") for t in (a, w))
    codes, weights = hopper.row_scaled(x, x_scales), hopper.row_scaled(m, m_scales)
    pair = (codes.codes, x_scales.squeeze(-1), weights.codes, m_scales.squeeze(-1))
    name = f"fp8-row grouped product, rows, {width} wide"
    yield rung(name, lambda: hopper.product_of_rows(codes, weights, ends), rows_name)
    yield rung(f"{name}, by torch", lambda: hopper.torch_rows(*pair, ends), rows_name)
    stored, scales = fused.fp8_columns(a, "nearest", None, 0, 0, None, ends)
    stops = fused.token_tiles(ends, tokens)[1]
    held = hopper.row_scaled(stored, scales, stops)
    same = (held.codes, scales) * 2
    name = f"fp8-row grouped product, contraction, {width} wide"
    yield rung(name, lambda: hopper.product_of_groups(held, held), groups_name)
    yield rung(f"{name}, by torch", lambda: hopper.torch_groups(*same, stops, torch.bfloat16), groups_name)
