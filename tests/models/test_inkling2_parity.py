"""The model is transformers' model: logits, losses, gradients and names."""

from pathlib import Path

import pytest
import torch
from inkling2_cases import CASES, random_ids, randomise, small_config
from torch import nn
from transformers import Inkling2ForCausalLM as Published

from nybble.models import Inkling2ForCausalLM


def _pair(**changes: object) -> tuple[nn.Module, Inkling2ForCausalLM]:
    published = Published(small_config(**changes))
    randomise(published)
    ours = Inkling2ForCausalLM(small_config(**changes))
    ours.load_state_dict(published.state_dict())
    return published, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_agree(case: str) -> None:
    published, ours = _pair(**CASES[case])
    ids = random_ids(2, 70)
    expected = published(ids, labels=ids)
    got = ours(ids, labels=ids, return_logits=True)
    expected.loss.backward()
    got.loss.backward()
    # FP32 keeps 24 bits; a few hundred operations in another order, through softmaxes and clips, cost four or
    # five of them. Logits reach 30.
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=0)
    wanted = dict(published.named_parameters())
    for name, parameter in ours.named_parameters():
        grad, reference = parameter.grad, wanted[name].grad
        assert grad is not None, name
        assert reference is not None
        assert reference.norm() > 0, f"{name} is not exercised"
        # gradients of small norm are differences of large terms
        error = (grad - reference).norm() / (reference.norm() + 1e-3)
        assert error < 2e-4, f"{name}: {error:.1e}"


def test_parameters_and_buffers_have_the_published_names_and_shapes() -> None:
    published, ours = Published(small_config()), Inkling2ForCausalLM(small_config())
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in published.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in ours.state_dict().items()} == expected
    parameters = {name for name, _ in published.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == parameters


def test_initial_weights_are_drawn_alike() -> None:
    config = small_config(hidden_size=64, n_routed_experts=8)
    published, ours = Published(config), Inkling2ForCausalLM(config)
    for name, parameter in ours.named_parameters():
        other = dict(published.named_parameters())[name]
        if float(other.detach().std() if other.numel() > 1 else 0) == 0:
            assert torch.equal(parameter, other), name
        elif other.numel() > 500:
            assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.2), name


def test_bf16_parameters_give_the_published_logits_in_bf16(tmp_path: Path) -> None:
    published, ours = _pair()
    published.save_pretrained(tmp_path)
    ids = random_ids(1, 40)
    exact = ours(ids).logits
    expected = Published.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits
    got = Inkling2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits
    # Both round in different places: each is as far from FP32 as the other.
    ours_off, theirs_off = (got - exact).abs().mean(), (expected - exact).abs().mean()
    assert ours_off < 1.5 * theirs_off + 1e-3


def test_loss_ignores_labels_of_minus_100_and_is_zero_without_labels() -> None:
    published, ours = _pair()
    ids = random_ids(2, 20)
    labels = ids.masked_fill(torch.rand(2, 20) < 0.5, -100)
    torch.testing.assert_close(
        ours(ids, labels=labels).loss, published(ids, labels=labels).loss, atol=1e-5, rtol=0
    )
    empty = ours(ids, labels=torch.full_like(ids, -100))
    empty.loss.backward()
    assert empty.loss == 0
    assert all(p.grad is None or not p.grad.isnan().any() for p in ours.parameters())


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (1, 1)])
def test_no_tokens_and_one_token(shape: tuple[int, int]) -> None:
    ours = Inkling2ForCausalLM(small_config()).train()
    ids = random_ids(*shape)
    output = ours(ids, shift_labels=ids, return_logits=True)
    output.loss.backward()
    assert output.logits.shape == (*shape, 100)
    assert output.loss.isfinite()


def test_a_nan_reaches_the_loss() -> None:
    ours = Inkling2ForCausalLM(small_config())
    with torch.no_grad():
        ours.model.layers[1].mlp.experts.down_proj[:, 3] = torch.nan
    ids = random_ids(2, 20)
    assert ours(ids, labels=ids).loss.isnan()
