"""The sampler's log-probabilities are those that the trainer computes again, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_cases import PARAMS, STOP, policy_model, requests, rollout
from torch._subclasses.fake_tensor import FakeTensorMode

from nybble.errors import RecipeError
from nybble.kernels.direct import by_hand, by_hand_in_any_mode
from nybble.models.cpu import exact
from nybble.models.invariant import batch_invariant
from nybble.recipes import load_recipe
from nybble.rl.batching import micro_batches
from nybble.rl.forward import score
from nybble.rl.policy import Policy
from nybble.rl.sampler import sample


@pytest.mark.parametrize("recipe", ["inkling", "bf16"])
def test_a_trainers_logprobs_equal_the_samplers_bit_for_bit(recipe: str) -> None:
    model = policy_model(recipe)
    asked = requests(72)
    done = sample(model, asked, PARAMS, STOP, invariant=True, prefill_chunk=7)
    assert len({len(c.tokens) for c in done}) > 5, "ragged"
    tokens = 0
    for batch in micro_batches([rollout(r, c) for r, c in zip(asked, done, strict=True)], 400, pad=0):
        scores = score(model, batch, invariant=True)  # with gradients, as in training
        assert torch.equal(scores.logprobs, batch.sampled)
        known = batch.experts >= 0
        assert torch.equal(scores.experts[known], batch.experts[known])
        tokens += len(batch.targets)
    assert tokens >= 1000


@torch.no_grad()
def test_chunks_of_a_prompt_batches_and_threads_leave_the_bits_alone() -> None:
    model = policy_model("inkling")
    asked, few = requests(3), replace(PARAMS, max_new_tokens=4)
    whole = sample(model, asked, few, STOP, invariant=True)
    chunked = sample(model, asked, few, STOP, invariant=True, prefill_chunk=1)
    alone = [sample(model, [request], few, STOP, invariant=True)[0] for request in asked]
    torch.set_num_threads(2)
    threaded = sample(model, asked, few, STOP, invariant=True)
    for other in (chunked, alone, threaded):
        assert other == whole
        assert all((a.experts == b.experts).all() for a, b in zip(other, whole, strict=True))


def test_passes_that_hide_products_give_way_to_the_mode_and_passes_of_a_row_stay() -> None:
    x = torch.randn(2, 32)
    with batch_invariant():
        assert not by_hand(x)
        assert by_hand_in_any_mode(x)
    assert by_hand(x)
    with FakeTensorMode():
        assert not by_hand_in_any_mode(torch.empty(2, 32))  # has no numbers for a kernel


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_rows_product_does_not_depend_on_the_other_rows(rows: int) -> None:
    a, b = torch.randn(64, 131), torch.randn(131, 77)
    with batch_invariant():
        whole, part = a @ b, a[:rows].clone() @ b
    assert torch.equal(whole[:rows], part)
    torch.testing.assert_close(whole, a @ b, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("own", "reference", "x"),
    [
        (exact.sigmoid, torch.sigmoid, torch.linspace(-95, 95, 4001)),
        (exact.tanh, torch.tanh, torch.linspace(-12, 12, 4001)),
        (exact.log, torch.log, torch.logspace(-30, 30, 501)),
    ],
)
def test_elementwise_functions_are_accurate_and_alike_in_every_lane(own, reference, x) -> None:
    torch.testing.assert_close(own(x), reference(x.double()).float(), atol=1e-37, rtol=6e-7)
    for n in (1, 5, 17):
        assert torch.equal(own(x)[:n], own(x[:n])), "a short tail has the bits of a long body"


def test_the_mode_ends_with_its_context_even_after_an_error() -> None:
    a, b = torch.randn(40, 300), torch.randn(300, 40)
    before = a @ b
    with pytest.raises(ZeroDivisionError), batch_invariant():
        raise ZeroDivisionError
    assert torch.equal(a @ b, before)


@pytest.mark.parametrize(
    "x", [{"format": "nvfp4", "outer": "tensor"}, {"format": "nvfp4", "rounding": "stochastic"}]
)
def test_a_forward_pass_that_mixes_tokens_is_refused(x: dict) -> None:
    rule = {"modules": "**", "kind": "linear", "fprop": {"x": x, "w": "nvfp4"}}
    recipe = load_recipe({"name": "mixing", "rule": [rule], "blocks": {"tails": "allow"}})
    model = policy_model("bf16")
    with pytest.raises(RecipeError, match="other tokens of a batch"):
        Policy(model, recipe, recipe, seed=0, invariant=True)


def test_experts_noted_are_those_of_each_token() -> None:
    model = policy_model("bf16")
    asked = requests(5)
    done = sample(model, asked, PARAMS, STOP, prefill_chunk=4)
    for request, completion in zip(asked, done, strict=True):
        assert completion.experts.shape == (len(request.prompt) + len(completion.tokens) - 1, 3, 2)
        assert completion.experts.dtype == np.uint16


def test_gradients_in_the_mode_are_those_outside_it() -> None:
    model = policy_model("bf16")
    asked = requests(6)
    done = sample(model, asked, PARAMS, STOP, invariant=True)
    (batch,) = micro_batches([rollout(r, c) for r, c in zip(asked, done, strict=True)], 400, pad=0)
    weight = torch.randn(len(batch.targets))
    found = []
    for invariant in (True, False):
        model.zero_grad()
        (score(model, batch, invariant=invariant, replay=True).logprobs * weight).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        # BF16 operands turn last bits of the forward pass into steps of 2^-9.
        torch.testing.assert_close(
            gradient, found[1][name], atol=0.02 * gradient.abs().max().item(), rtol=0.02
        )
