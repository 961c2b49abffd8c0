"""Documents and generation: what is kept between tokens is what a forward pass of one document computes."""

import pytest
import torch
from nemotron_h_cases import random_ids, random_model

from nybble.errors import NybbleError
from nybble.models.cpu import scan as by_hand
from nybble.models.generate import generate

# Chunks add in another order than the whole: FP32 rounding on logits up to 10.
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize("cuts", [[70], [5, 6, 40, 41, 42, 70], list(range(1, 71))])
@torch.no_grad()
def test_prefill_in_chunks_and_decoding_equal_the_full_forward(cuts: list[int]) -> None:
    model = random_model(time_step_min=0.5)  # steps at their bound while decoding too
    ids = random_ids(2, 70)
    cache = model.new_cache()
    parts, start = [], 0
    for end in cuts:
        parts.append(model(ids[:, start:end], cache=cache).logits)
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, **CLOSE)


SEGMENTS = torch.tensor([[0] * 20 + [1] * 3 + [2] * 47, [5] * 32 + [6] * 37 + [7]])
SPANS = [(0, 0, 20), (0, 20, 23), (0, 23, 70), (1, 0, 32), (1, 32, 69), (1, 69, 70)]


@pytest.mark.parametrize("chunk", [16, 64])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "CHUNK", chunk)
    monkeypatch.setattr("nybble.models.nemotron_h.scan.CHUNK", chunk)
    model = random_model()
    ids = random_ids(2, 70)
    packed = model(ids, segments=SEGMENTS).logits
    for row, start, end in SPANS:
        alone = model(ids[row : row + 1, start:end]).logits
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, **CLOSE)
    model.flex = True
    torch.testing.assert_close(model(ids, segments=SEGMENTS).logits, packed, **CLOSE)
    cache = model.new_cache()
    parts = [
        model(ids[:, a:b], segments=SEGMENTS[:, a:b], cache=cache).logits
        for a, b in [(0, 21), (21, 22), (22, 32), (32, 70)]
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), packed, **CLOSE)
    with pytest.raises(NybbleError, match="segments are missing"):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("plain", [False, True])
def test_packed_documents_have_gradients_of_their_own(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "CHUNK", 16)
    monkeypatch.setattr("nybble.models.nemotron_h.scan.CHUNK", 16)
    if plain:
        monkeypatch.setattr("nybble.models.nemotron_h.scan.by_hand_in_any_mode", lambda _: False)
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
    together = generate(model, prompts, 12, temperature=0.0)
    assert together == [generate(model, [p], 12, temperature=0.0)[0] for p in prompts]


def test_checkpointed_layers_give_the_same_bits() -> None:
    model = random_model().train()
    ids = random_ids(2, 40)
    results = []
    for layers in (False, True):
        model.checkpoint_layers(layers)
        model.zero_grad()
        model.reset_expert_counts()
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), model.expert_counts()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-1].sum().item() == 2 * 40 * 2, "one layer of experts, two experts a token"


@pytest.mark.parametrize("threads", [2, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    from nybble.models.nemotron_h.scan import Shape

    shape = Shape(H=8, P=16, G=2, N=16)
    tensors = [torch.randn(3, 400, shape.width), torch.rand(3, 400, 8), -torch.rand(8), torch.randn(8)]
    dy = torch.randn(3, 400, 128)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        y, states = by_hand.forward(*tensors, shape, None)
        results.append([y, states, *by_hand.backward(dy, y, states, *tensors, shape, None)])
    # torch's own products may divide their work by threads; the passes between may not
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_training_goes_on_after_an_evaluation_in_inference_mode() -> None:
    model = random_model(hybrid_override_pattern="M")
    ids = random_ids(2, 33)
    by_hand._kept.__dict__.clear()
    with torch.inference_mode():
        before = model(ids, labels=ids).loss.item()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == before
