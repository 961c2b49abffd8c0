"""Tokens per expert and the bias that balances them."""

import torch
from inkling2_cases import random_ids, random_model

from nybble.models.experts import sort_by_expert


def test_counts_are_the_rows_of_each_expert_in_training_only() -> None:
    model = random_model()
    ids = random_ids(3, 20)
    model(ids)
    assert not model.expert_counts().any()
    model.train()
    model(ids)
    model(ids)
    counts = model.expert_counts()
    assert counts.shape == (3, 4)
    assert counts.sum(-1).tolist() == [2 * 3 * 20 * 2] * 3
    model.reset_expert_counts()
    assert not model.expert_counts().any()
    assert "expert_load" not in model.state_dict()


def test_bias_moves_towards_the_mean_load_and_evens_it() -> None:
    model = random_model().train()
    ids = random_ids(4, 64)
    routers = list(model.routers())
    for router in routers:
        router.e_score_correction_bias.zero_()
        router.e_score_correction_bias[0] = 0.5  # everyone's favourite
    spread = []
    for _ in range(60):
        model(ids)
        counts = model.expert_counts().float()
        spread.append((counts.amax(-1) / counts.mean(-1)).max().item())
        before = [router.e_score_correction_bias.clone() for router in routers]
        model.update_router_bias(0.02)
        for load, old, router in zip(counts, before, routers, strict=True):
            step = router.e_score_correction_bias - old
            torch.testing.assert_close(step, 0.02 * torch.sign(load.mean() - load))
    assert not model.expert_counts().any()
    assert spread[-1] < 0.8 * spread[0]


def test_sorting_is_stable_and_names_every_row_once() -> None:
    experts = torch.tensor([[2, 0], [0, 2], [3, 0]])
    order, place, ends = sort_by_expert(experts, 5)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]
    assert order[place].tolist() == list(range(6))
    assert ends.tolist() == [3, 3, 5, 6, 6]
    assert ends.dtype == torch.int32
    order, place, ends = sort_by_expert(experts[:0], 5)
    assert order.numel() == place.numel() == 0
    assert ends.tolist() == [0] * 5
