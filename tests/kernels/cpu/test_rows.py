"""Passes over rows: rounding to BF16, order by expert, copies, weighted sums."""

import pytest
import torch

from nybble.kernels.cpu import rows
from nybble.kernels.cpu.bf16 import rounded


def test_rounding_to_bf16_is_the_cast() -> None:
    x = torch.randn(300, 257) * torch.exp(torch.randn(300, 257) * 30)
    x[0, :6] = torch.tensor([torch.inf, -torch.inf, 3.4e38, -0.0, 1e-44, 1.00390625])
    torch.testing.assert_close(rounded(x.T), x.T.bfloat16().float(), rtol=0, atol=0)
    assert rounded(torch.tensor([torch.nan, -torch.nan])).isnan().all()
    assert rounded(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("k", [1, 3])
def test_rows_by_expert_and_back(k: int) -> None:
    experts = torch.randint(0, 6, (500, k))
    experts[experts == 2] = 5
    order, place, ends = rows.sort(experts, 6)
    flat = experts.reshape(-1)
    assert torch.equal(order, torch.argsort(flat, stable=True))
    assert torch.equal(order[place], torch.arange(len(flat)))
    assert torch.equal(ends.long(), torch.bincount(flat, minlength=6).cumsum(0))
    x, weights = torch.randn(500, 33), torch.rand(500, k)
    got = rows.gather(x, order, k, torch.empty(500 * k, 33))
    assert torch.equal(got, x[order // k])
    torch.testing.assert_close(rows.combine(got, place, weights, k), x * weights.sum(-1, keepdim=True))
    torch.testing.assert_close(rows.combine(got, place, None, k), x * k)
