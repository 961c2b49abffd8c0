"""Inputs of the passes over expert rows, and how near two results must be."""

from typing import Any

import torch
from cuda_cases import KEY, same
from torch import Tensor

from nybble.formats import reference
from nybble.kernels import expert_columns

CAPS = (4.0, 25.0)


def routing(T: int, k: int, E: int, seed: int = 0) -> dict[str, Any]:
    """Tokens sorted by expert; a tenth of the pairs have an expert that is not here."""
    gen = torch.Generator().manual_seed(seed)
    experts = torch.randint(E + 1, (T, k), generator=gen)
    experts[experts == 1] = 0  # an expert without tokens
    ordered, order = torch.sort(experts.reshape(-1), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(E), right=True).to(torch.int32)
    place = torch.empty(T * k, dtype=torch.int32)
    place[order] = torch.arange(T * k, dtype=torch.int32)
    order = order.to(torch.int32)
    return {"order": order, "ends": ends, "place": place, "token": order // k, "k": k, "R": T * k}


def calls(
    T: int = 4, k: int = 2, E: int = 3, width: int = 32, seed: int = 0
) -> list[tuple[str, tuple[Any, ...]]]:
    """(op, arguments) for every kernel."""
    r = routing(T, k, E, seed)
    gen = torch.Generator().manual_seed(seed + 1)
    R, order, ends, place, token = r["R"], r["order"], r["ends"], r["place"], r["token"]

    def bf16(rows: int, cols: int) -> Tensor:
        spread = torch.exp2(torch.randint(-6, 4, (rows, cols), generator=gen).float())
        return (torch.randn(rows, cols, generator=gen) * spread).bfloat16()

    x, gate_up, g, h = bf16(T, width), bf16(R, 2 * width), bf16(R, width), bf16(R, width)
    broken = g.clone()
    broken[:: max(R // 3, 1), 5] = torch.nan
    broken[1, :3] = torch.inf
    empty = g.clone()
    empty[::2] = 0
    f, weights = torch.rand(R, generator=gen) + 0.5, torch.rand(R, generator=gen)
    codes_h = list(reference.quantize(h, "nvfp4", -1, outer="row"))
    codes_x = list(reference.quantize(x, "nvfp4", -1, outer="row"))
    # Rows of zeros, one whose scale is 1 as theirs is, one of which nothing but its scale is left, and NaN.
    few = torch.where(torch.arange(T)[:, None] % 3 == 1, 0, x).float()
    few[0] = torch.linspace(-448, 448, width)
    few[3:4] = 1e-43
    bytes_x, scales_x, _ = reference.quantize(few, "fp8-row", -1)
    bytes_g, scales_g, _ = reference.quantize(torch.where(empty == 0, empty, broken), "fp8-row", -1)
    signed = f * torch.where(torch.arange(R) % 3 == 0, -1, 1) * (torch.arange(R) % 5 != 1)
    pairs = order.long()
    sr = ("stochastic", KEY, 3, 5)
    nearest = ("nearest", None, 0, 0, None)
    tiles, _ = expert_columns.token_tiles(ends, R)
    amax_t, amax_e = torch.rand(T, generator=gen), torch.rand(E, generator=gen)
    experts = torch.randint(E + 2, (T, k), generator=gen)
    return [
        ("sort_pairs", (experts, E)),
        ("sort_pairs", (experts.repeat(90, 1), E)),
        ("sort_pairs", (torch.full((T, k), E + 5), E)),
        ("sort_pairs", (experts[:, :1], E)),  # so that flattening it copies nothing
        ("count_pairs", (experts.repeat(90, 1), E)),
        ("count_pairs", (experts[:, :1], E)),
        ("row_facts", (order, k, torch.arange(T) * 3 + 1, True)),
        ("row_facts", (order, k, torch.arange(2 * T)[1::2], True)),
        ("row_facts", (order, k, None, True)),
        ("row_facts", (order, k, None, False)),
        ("token_tiles", (ends, R)),
        ("row_factors", (order, ends, k, amax_t, "nvfp4", "token", amax_e, "nvfp4", weights)),
        ("row_factors", (order, ends, k, weights, "nvfp4-4over6", "row", None, "bf16", None)),
        ("row_factors", (order, ends, k, amax_t[:1], "nvfp4", "one", amax_e[:1], "nvfp4", None)),
        ("outer_scales", (amax_t, "nvfp4")),
        ("outer_scales", (amax_e.sum(), "nvfp4-4over6")),
        ("outer_scales", (amax_e[:0], "nvfp4")),
        ("gather_rows", (x, token, None)),
        ("gather_rows", (x, token, f)),
        ("combine_rows", (h, f, place, ends, k)),
        ("combine_rows", (h, None, place, ends, k)),
        ("swiglu_rows", (gate_up, f, ends, *CAPS)),
        ("swiglu_rows", (gate_up, None, ends, 0.0, 0.0)),
        ("swiglu_quantize", (gate_up, f, ends, *CAPS, "nvfp4", *nearest)),
        ("swiglu_quantize", (gate_up, None, ends, 0.0, 0.0, "nvfp4", *sr, pairs)),
        ("swiglu_backward", (gate_up, f, g, f, weights, order, ends, *CAPS, codes_h, "nvfp4", True)),
        ("swiglu_backward", (gate_up, None, g, None, weights, order, ends, 0.0, 0.0, [h], "bf16", True)),
        ("swiglu_backward", (gate_up[:0], None, g, None, weights, order, ends, *CAPS, [h], "bf16", False)),
        (
            "swiglu_backward_fp8",
            (gate_up, f, g, f, weights, order, ends, *CAPS, codes_h, "nvfp4"),
        ),
        (
            "swiglu_backward_fp8",
            (gate_up, None, broken, None, weights, order, ends, 0.0, 0.0, [h], "bf16"),
        ),
        ("swiglu_backward_fp8", (gate_up, None, empty, None, weights, order, ends, *CAPS, [], "bf16", tiles)),
        ("swiglu_backward_both", (gate_up, f, g, f, weights, order, ends, *CAPS, codes_h, "nvfp4", "mxfp8")),
        (
            "swiglu_backward_both",
            (gate_up, None, broken, None, weights, order, ends, 0.0, 0.0, [h], "bf16", "mxfp8", tiles),
        ),
        (
            "swiglu_backward_both",
            (gate_up, None, g, None, weights, order, ends, *CAPS, [], "bf16", "mxfp8-floor"),
        ),
        ("quantize_to_rows", (x, "nvfp4", *nearest, place)),
        ("quantize_to_rows", (x, "nvfp4", *sr, torch.arange(T) + 7, place)),
        ("decode_to_rows", (*codes_x, "nvfp4", token)),
        ("requantize_rows", (*codes_x, "nvfp4", token, "mxfp8", *sr, pairs, ends)),
        ("requantize_rows", (*codes_h, "nvfp4", None, "mxfp8", *nearest, ends, tiles)),
        ("gradient_both", (x, "mxfp8", token, f, ends)),
        ("gradient_both", (gate_up, "mxfp8", None, None, ends, tiles)),
        ("fp8_columns", (g, *nearest, ends)),
        ("fp8_columns", (x, *nearest, ends, token, f, tiles)),
        ("fp8_columns", (x.float(), *sr, pairs, ends, token)),
        ("fp8_columns", (torch.where(g > 3, torch.nan, g), *sr, pairs, ends)),
        ("fp8_columns_of_codes", (*codes_x, "nvfp4", token, *sr, pairs, ends)),
        ("fp8_columns_of_codes", (*codes_h, "nvfp4", None, *nearest, ends, tiles)),
        ("fp8_columns_of_codes", (*codes_x, "nvfp4", token, *sr, pairs, ends, tiles, signed)),
        ("fp8_columns_of_codes", (*codes_h, "nvfp4", None, *nearest, ends, None, signed)),
        ("transpose_codes", (bytes_x, ends, token, tiles)),
        ("transpose_codes", (bytes_g, ends)),
        ("gradient_factors", (bytes_x, scales_x.squeeze(-1), order, k, signed)),
        ("gradient_factors", (bytes_g, scales_g.squeeze(-1))),
    ]


def results(module: Any, op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What an op gives, without the rows of no expert where it says nothing of them."""
    out = getattr(module, op)(*args)
    out = out if isinstance(out, tuple) else (out,)
    if op in ("requantize_rows", "gradient_both"):
        ends = next(a for a in reversed(args) if isinstance(a, Tensor) and a.dim() == 1)
        last = int(ends[-1])
        out = tuple(t[:last] for t in out)
    if op == "swiglu_backward_fp8":
        ends = args[6].cpu()
        last = int(ends[-1])
        codes, columns, scales = out[0][:last].cpu(), out[1].cpu(), out[2][:last].cpu()
        d = module.swiglu_backward(*args[:11], True)[0].cpu()
        want = reference.quantize(d[:last], "fp8-row", -1)[:2]
        want_scales = expert_columns.gradient_factors(want[0], want[1].squeeze(-1))
        turned = expert_columns.transpose_codes(out[0].cpu(), ends)
        follows = [same(codes, want[0]), same(scales, want_scales), same(columns, turned)]
        return codes, scales, out[3], torch.tensor(follows)
    if op == "swiglu_backward_both":
        ends = args[6].cpu()
        last = int(ends[-1])
        d = module.swiglu_backward(*args[:11], True)[0].cpu()
        want = expert_columns.gradient_both(d, args[11], None, None, ends)
        follows = [same(got[:last].cpu(), w[:last]) for got, w in zip(out[:2], want, strict=True)]
        return d[:last], out[2], torch.tensor(follows)
    return out


def wrong(got: tuple[Tensor, ...], want: tuple[Tensor, ...], op: str, exact: bool = True) -> list[int]:
    """Which results differ: in a bit, but by more than the last places where tanh, exp or a sum come in.

    Codes of an activation that differs in its last BF16 place may differ in one step: of those few may.
    """
    out = []
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        g = g.cpu()
        if g.shape != w.shape:
            ok = False
        elif g.numel() == 0:
            ok = True
        elif g.dtype == torch.bool:
            ok = bool(g.all())
        elif exact and "swiglu" not in op:
            ok = same(g, w)
        elif g.dtype == torch.uint8:
            ok = (g != w).float().mean() < 0.02
        else:
            scale = float(torch.where(w.isfinite(), w, 0).float().abs().max()) + 1e-30
            near = (g.float() - w.float()).abs() <= w.float().abs() * 2**-7 + scale * 1e-5
            near |= (g == w) | (g.isnan() & w.isnan())
            ok = bool(near.float().mean() > 0.98 if op == "swiglu_quantize" else near.all())
        if not ok:
            out.append(i)
    return out
