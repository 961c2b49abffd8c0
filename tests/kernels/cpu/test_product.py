"""Products by tiles against FP64: groups, layouts, edges, sums; a row's bits, the same everywhere."""

import pytest
import torch
from torch import Tensor

from nybble.kernels.cpu import product, threads

SHAPES = [
    ([270, 0, 5, 131], 37, 45),
    ([7], 16, 500),
    ([1, 2, 3], 400, 192),
    ([64, 100], 192, 800),
    ([300, 200], 20, 6000),  # rows in blocks
]


def _near(got: Tensor, want: Tensor, terms: int) -> None:
    # FP32 sums of that many terms of size 1
    assert (got - want).abs().max() <= 4e-7 * terms + 1e-6


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MIN_ELEMENTS_PER_THREAD", 1)
    torch.set_num_threads(request.param)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("sizes", "N", "K"), SHAPES)
def test_groups_of_rows(sizes: list[int], N: int, K: int) -> None:
    ends = torch.tensor(sizes).cumsum(0).int()
    R, G = int(ends[-1]) + 2, len(sizes)
    a, b = torch.randn(R, K), torch.randn(G, K, N)
    out, other = torch.full((R, N), 7.0), torch.full((R, N), 7.0)
    product.grouped_rows(a, b, ends, False, out)
    product.grouped_rows(a, b.transpose(1, 2).contiguous(), ends, True, other)
    assert torch.equal(out, other)
    assert (out[-2:] == 7.0).all()
    for x, w, y in zip(a[:-2].double().split(sizes), b.double(), out[:-2].split(sizes), strict=True):
        if len(x):
            _near(y, x @ w, K)
    product.grouped_rows(a, b, ends, False, other, add=True)
    torch.testing.assert_close(other[:-2], 2 * out[:-2], rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("sizes", "N", "M"), SHAPES)
def test_columns_of_groups(sizes: list[int], N: int, M: int) -> None:
    ends = torch.tensor(sizes).cumsum(0).int()
    R, G = int(ends[-1]) + 2, len(sizes)
    a, b = torch.randn(R, M), torch.randn(R, N)
    out, other = torch.full((G, M, N), 7.0), torch.full((G, M, N), 7.0)
    product.grouped_columns(a, b, ends, False, out)
    product.grouped_columns(a, b.T.contiguous(), ends, True, other)
    assert torch.equal(out, other)
    parts = zip(a[:-2].double().split(sizes), b[:-2].double().split(sizes), out, strict=True)
    for x, y, got in parts:
        _near(got, x.T @ y, len(x))
    product.grouped_columns(a, b, ends, False, other, add=True)
    torch.testing.assert_close(other, 2 * out, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(50, 70, 30), (1, 9, 5), (3, 1, 1), (0, 4, 3), (4, 3, 0)])
def test_matrices_in_any_layout(M: int, N: int, K: int, a_by_columns: bool, b_by_columns: bool) -> None:
    a = torch.randn(K, M).T if a_by_columns else torch.randn(M, K)
    b = torch.randn(N, K).T if b_by_columns else torch.randn(K, N)
    for function in (product.matmul, product.tiles):
        got = function(a, b, torch.empty(M, N))
        assert got.shape == (M, N)
        if got.numel():
            _near(got, a.double() @ b.double(), K)


def test_a_row_has_the_same_bits_among_others_and_alone() -> None:
    a, b = torch.randn(101, 300), torch.randn(300, 50)
    whole = product.tiles(a, b, torch.empty(101, 50))
    for i in (0, 5, 97, 100):
        assert torch.equal(product.tiles(a[i : i + 1], b, torch.empty(1, 50))[0], whole[i])


def test_not_a_number_stays_in_its_row() -> None:
    a, b = torch.randn(13, 20), torch.randn(20, 24)
    a[4, 3] = torch.nan
    bad = product.tiles(a, b, torch.empty(13, 24)).isnan()
    assert bad[4].all()
    assert bad.sum() == 24
