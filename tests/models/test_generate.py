"""Generation: what the cache holds is what a full forward computes."""

import pytest
import torch
from inkling2_cases import random_ids, random_model

from nybble.errors import NybbleError
from nybble.models.generate import generate, pick

# Chunks of one sequence add in another order than the whole: FP32 rounding on logits up to 30.
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize("cuts", [[70], [5, 6, 40, 41, 42, 70], list(range(1, 71))])
@torch.no_grad()
def test_prefill_in_chunks_and_decoding_equal_the_full_forward(cuts: list[int]) -> None:
    model = random_model()
    ids = random_ids(2, 70)
    cache = model.new_cache()
    parts, start = [], 0
    for end in cuts:
        parts.append(model(ids[:, start:end], cache=cache).logits)
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, **CLOSE)
    assert cache.keys[0].data.shape[1] == 15, "a sliding layer keeps only what later queries reach"


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model = random_model()
    ids = random_ids(2, 70)
    segments = torch.tensor([[0] * 20 + [1] * 3 + [2] * 47, [5] * 69 + [6]])
    packed = model(ids, segments=segments)
    for row, start, end in [(0, 0, 20), (0, 20, 23), (0, 23, 70), (1, 0, 69), (1, 69, 70)]:
        alone = model(ids[row : row + 1, start:end]).logits
        torch.testing.assert_close(packed.logits[row : row + 1, start:end], alone, **CLOSE)
    cache = model.new_cache()
    parts = [
        model(ids[:, a:b], segments=segments[:, a:b], cache=cache).logits
        for a, b in [(0, 21), (21, 22), (22, 70)]
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), packed.logits, **CLOSE)
    with pytest.raises(NybbleError, match="segments are missing"):
        model(ids[:, :1], cache=cache)
    cache = model.new_cache()
    model(ids[:, :3], cache=cache)
    with pytest.raises(NybbleError, match="give them from the start"):
        model(ids[:, 3:5], segments=segments[:, 3:5], cache=cache)


def test_packed_documents_have_gradients_of_their_own() -> None:
    model = random_model()
    ids = random_ids(1, 40)
    segments = torch.tensor([[0] * 15 + [1] * 25])
    labels = ids.clone()
    labels[:, 15] = -100  # no document predicts the first token of the next
    model(ids, labels=labels, segments=segments).loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for start, end, share in [(0, 15, 14 / 38), (15, 40, 24 / 38)]:
        (model(ids[:, start:end], labels=ids[:, start:end]).loss * share).backward()
    for name, p in model.named_parameters():
        assert (p.grad - packed[name]).norm() <= 2e-4 * (p.grad.norm() + 1e-3), name


def test_prompts_of_different_lengths_continue_as_if_alone() -> None:
    model = random_model()
    prompts = [random_ids(1, n)[0].tolist() for n in (7, 30, 1)]
    together = generate(model, prompts, 20, temperature=0.0)
    assert together == [generate(model, [p], 20, temperature=0.0)[0] for p in prompts]
    assert [len(new) for new in together] == [20, 20, 20]
    sampled = generate(model, prompts, 20, temperature=0.8, top_p=0.9, seed=3)
    assert sampled == generate(model, prompts, 20, temperature=0.8, top_p=0.9, seed=3)
    assert sampled != generate(model, prompts, 20, temperature=0.8, top_p=0.9, seed=4)


def test_generation_stops_behind_the_end_of_text_and_restores_the_mode() -> None:
    model = random_model().train()
    prompt = random_ids(1, 9)[0].tolist()
    free = generate(model, [prompt], 30, temperature=0.0)[0]
    eos = free[3]
    stopped = generate(model, [prompt], 30, temperature=0.0, eos=eos)[0]
    assert stopped == free[: free.index(eos) + 1]
    assert model.training
    assert not model.expert_counts().any()


def test_pick_follows_the_probabilities() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    draw = (torch.arange(4000) + 0.5) / 4000
    shares = torch.bincount(pick(logits, 1.0, 1.0, draw), minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=1e-3, rtol=0)
    # 0.5 + 0.3 reach 0.7: two tokens remain, at 5 : 3
    shares = torch.bincount(pick(logits, 1.0, 0.7, draw), minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=1e-3, rtol=0)
    assert pick(logits, 0.0, 1.0, draw).eq(0).all()


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt is empty"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": 1e-300}, "temperature = 1e-300 must be 0.001 or more, or 0"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[128]], {}, "holds token 128, but the model's vocabulary has 128"),
        ([[1] * 300], {}, "longer than max_position_embeddings = 256"),
    ],
)
def test_what_cannot_be_generated_is_said(prompts: list[list[int]], settings: dict, message: str) -> None:
    with pytest.raises(NybbleError, match=message):
        generate(random_model(), prompts, 5, **settings)
