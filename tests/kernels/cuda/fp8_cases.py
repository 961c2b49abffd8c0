"""FP8 products of experts against plain ones, on any device that runs the kernels.

Codes are small integers and scales powers of two: every partial sum is exact, even in the 14 bits with which
Hopper's tensor cores add, so that results must be equal bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nybble.kernels.expert_columns import token_tiles

FP8 = torch.float8_e4m3fn


def integers(*shape: int, seed: int) -> Tensor:
    """E4M3 codes of -2 to 2."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float().to(FP8)


def powers(*shape: int, seed: int) -> Tensor:
    """FP32 scales from 1/8 to 4."""
    return torch.exp2(torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(seed)).float())


def rows_case(sizes: Sequence[int], N: int, C: int, behind: int = 9) -> dict[str, Tensor]:
    """Groups of rows of a [R, C]; `behind` rows of no expert, which are NaN."""
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    R, E = int(offs[-1]) + behind, len(sizes)
    codes, scales = integers(R, C, seed=1), powers(R, seed=2)
    codes.view(torch.uint8)[int(offs[-1]) :] = 0x7F
    return {
        "codes": codes,
        "scales": scales,
        "w_codes": integers(E, N, C, seed=3),
        "w_scales": powers(E, N, seed=4),
        "offs": offs,
    }


def columns_case(sizes: Sequence[int], N: int, K: int) -> dict[str, Tensor]:
    """Groups along P of a [N, P] and b [K, P], which end at multiples of 32; what no group has is NaN."""
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    G = len(sizes)
    _, ends = token_tiles(offs, int(offs[-1]))
    P = 32 * (int(offs[-1]) // 32 + G)
    a, b = integers(N, P, seed=5), integers(K, P, seed=6)
    start = 0
    for size, end in zip(sizes, ends.tolist(), strict=True):
        for codes in (a, b):
            codes.view(torch.uint8)[:, start + size : end] = 0
        start = end
    for codes in (a, b):
        codes.view(torch.uint8)[:, start:] = 0x7F
    return {
        "a_codes": a,
        "a_scales": powers(G, N, seed=7),
        "b_codes": b,
        "b_scales": powers(G, K, seed=8),
        "ends": ends,
    }


def rows_wanted(case: dict[str, Tensor]) -> Tensor:
    """BF16, rows of experts alone."""
    a = case["codes"].float() * case["scales"][:, None]
    w = case["w_codes"].float() * case["w_scales"][..., None]
    parts, start = [], 0
    for e, end in enumerate(case["offs"].tolist()):
        parts.append(a[start:end] @ w[e].T)
        start = end
    return torch.cat(parts).bfloat16()


def columns_wanted(case: dict[str, Tensor]) -> Tensor:
    """FP32."""
    out, start = [], 0
    for g, end in enumerate(case["ends"].tolist()):
        a, b = (
            case[f"{n}_codes"][:, start:end].float() * case[f"{n}_scales"][g][:, None] for n in ("a", "b")
        )
        out.append(a @ b.T)
        start = end
    return torch.stack(out)


def gathered(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows, most of them twice, behind an index."""
    count = case["codes"].shape[0]
    index = torch.randperm(count, generator=torch.Generator().manual_seed(9))
    codes = torch.empty_like(case["codes"])
    codes.view(torch.uint8)[index] = case["codes"].view(torch.uint8)
    scales = torch.empty_like(case["scales"])
    scales[index] = case["scales"]
    return {**case, "codes": codes, "scales": scales, "index": index.to(torch.int32)}


def moved(case: dict[str, Tensor], device: Any) -> dict[str, Tensor]:
    """On a device."""
    return {name: t.to(device) for name, t in case.items()}


def check(
    products: Any, device: torch.device, sizes: Sequence[int], N: int, C: int, dtypes: Sequence[torch.dtype]
) -> None:
    """`product_of_rows` and `product_of_groups` of a module against the plain ones, bit for bit."""
    case = rows_case(sizes, N, C)
    last = int(case["offs"][-1])
    for given in (case, gathered(case)):
        got = products.product_of_rows(**moved(given, device))
        assert torch.equal(got[:last].cpu(), rows_wanted(case)), "index" in given
    groups = columns_case(sizes, N, C)
    ones = {**groups, "a_scales": torch.ones_like(groups["a_scales"])}
    for dtype in dtypes:
        got = products.product_of_groups(**moved(groups, device), dtype=dtype)
        assert torch.equal(got.cpu(), columns_wanted(groups).to(dtype)), dtype
        got = products.product_of_groups(**{**moved(groups, device), "a_scales": None}, dtype=dtype)
        assert torch.equal(got.cpu(), columns_wanted(ones).to(dtype)), dtype
