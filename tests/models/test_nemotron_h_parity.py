"""The model is transformers' model: logits, losses, gradients and names."""

from pathlib import Path

import pytest
import torch
from nemotron_h_cases import CASES, random_ids, randomise, small_config
from torch import nn
from transformers import NemotronHForCausalLM as Published

from nybble.models import NemotronHForCausalLM


def _pair(**changes: object) -> tuple[nn.Module, NemotronHForCausalLM]:
    published = Published(small_config(**changes))
    randomise(published)
    ours = NemotronHForCausalLM(small_config(**changes))
    ours.load_state_dict(published.state_dict())
    return published, ours


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_agree(case: str, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    published, ours = _pair(**CASES[case])
    if not by_hand:
        monkeypatch.setattr("nybble.models.nemotron_h.scan.by_hand_in_any_mode", lambda _: False)
        monkeypatch.setattr("nybble.models.nemotron_h.scan.CHUNK", 16)
    ids = random_ids(2, 70)
    expected = published(ids, labels=ids, use_cache=False)
    got = ours(ids, labels=ids, return_logits=True)
    expected.loss.backward()
    got.loss.backward()
    # FP32 keeps 24 bits; a few hundred operations in another order, through exponentials, cost four or five
    # of them. Logits reach 10.
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
    published, ours = Published(small_config()), NemotronHForCausalLM(small_config())
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in published.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in ours.state_dict().items()} == expected
    parameters = {name for name, _ in published.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == parameters


def test_initial_weights_are_drawn_alike() -> None:
    config = small_config(hidden_size=64, mamba_num_heads=128, mamba_head_dim=4)
    published, ours = Published(config), NemotronHForCausalLM(config)
    others = dict(published.named_parameters())
    for name, parameter in ours.named_parameters():
        other = others[name]
        if name.endswith("dt_bias"):  # steps between the config's bounds, evenly over the orders of magnitude
            steps = torch.nn.functional.softplus(parameter).log10()
            assert -3.01 < steps.min() < -2.8
            assert -1.2 < steps.max() < -0.99
            assert steps.mean().item() == pytest.approx(-2.0, abs=0.2)
        elif float(other.detach().std() if other.numel() > 1 else 0) == 0 or name.endswith("A_log"):
            assert torch.equal(parameter, other), name
        elif other.numel() > 500:
            assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.2), name


def test_bf16_parameters_give_the_published_logits_in_bf16(tmp_path: Path) -> None:
    published, ours = _pair(hybrid_override_pattern="M-M*-")
    published.save_pretrained(tmp_path)
    ids = random_ids(1, 40)
    exact = ours(ids).logits
    expected = Published.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits
    got = NemotronHForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits
    # Both round in different places: each is as far from FP32 as the other.
    ours_off, theirs_off = (got - exact).abs().mean(), (expected - exact).abs().mean()
    assert ours_off < 1.5 * theirs_off + 1e-3


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (1, 1)])
def test_no_tokens_and_one_token(shape: tuple[int, int]) -> None:
    ours = NemotronHForCausalLM(small_config()).train()
    ids = random_ids(*shape)
    output = ours(ids, shift_labels=ids, return_logits=True)
    output.loss.backward()
    assert output.logits.shape == (*shape, 100)
    assert output.loss.isfinite()


@pytest.mark.parametrize("where", ["in_proj.weight", "A_log", "conv1d.bias", "norm.weight"])
def test_a_nan_reaches_the_loss(where: str) -> None:
    ours = NemotronHForCausalLM(small_config())
    with torch.no_grad():
        ours.model.layers[2].mixer.get_parameter(where).view(-1)[5] = torch.nan
    ids = random_ids(2, 20)
    assert ours(ids, labels=ids).loss.isnan()
