"""Pairs sorted by expert: the specification against Python's own sort."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nybble.kernels import expert_order


@given(experts=st.lists(st.integers(0, 9), max_size=40), count=st.integers(1, 9))
def test_pairs_are_sorted_stably_and_counted(experts, count):
    """Pairs of an expert that is not here go last and count for none."""
    order, ends = expert_order.sort_pairs(torch.tensor(experts, dtype=torch.int64)[:, None], count)
    assert order.tolist() == sorted(range(len(experts)), key=lambda pair: min(experts[pair], count))
    counts = [experts.count(e) for e in range(count)]
    assert ends.tolist() == [sum(counts[: e + 1]) for e in range(count)]
    got = expert_order.count_pairs(torch.tensor(experts, dtype=torch.int64)[:, None], count)
    assert got.tolist() == counts
    assert {order.dtype, ends.dtype, got.dtype} == {torch.int32, torch.int64}
