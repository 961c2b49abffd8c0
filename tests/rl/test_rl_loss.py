"""Advantages, the policy-gradient loss, and the log-probabilities it differentiates."""

import math

import pytest
import torch

from nybble.errors import ConfigError
from nybble.models.logprobs import token_log_probs
from nybble.rl.loss import LossConfig, advantages, estimate_k3, token_loss


def test_advantages_are_rewards_above_the_groups_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "mean") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([0.3, 0.3, 0.3], "mean") == [0.0, 0.0, 0.0]
    assert advantages([0.3, 0.3], "std") == [0.0, 0.0], "no division by a spread of zero"
    assert advantages([1.0, 0.0, 0.0, 0.0], "std") == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -0.5, 0.0])
    parts = token_loss(logprobs, logprobs.detach(), logprobs.detach(), advantage, LossConfig())
    parts.loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantage)
    assert not parts.clipped.any()


def test_clipping_stops_what_has_moved_far_enough() -> None:
    old = torch.zeros(4)
    # ratios 1.25 and 0.7, each with either sign of the advantage
    logprobs = torch.tensor([1.25, 1.25, 0.7, 0.7]).log().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    parts = token_loss(logprobs, old, old, advantage, LossConfig())
    parts.loss.sum().backward()
    assert parts.clipped.tolist() == [True, False, False, True]
    assert (logprobs.grad == 0).tolist() == [True, False, False, True]
    higher = token_loss(logprobs.detach(), old, old, advantage, LossConfig(clip_high=0.28))
    assert not higher.clipped[0], "clip higher"


def test_importance_weights_are_truncated_and_masked() -> None:
    old = torch.tensor([0.0, 0.0, 0.0])
    sampled = -torch.tensor([1.5, 8.0, 0.1]).log()  # ratios of trainer to sampler
    advantage = torch.ones(3)
    plain = token_loss(old, old, sampled, advantage, LossConfig())
    assert plain.loss.tolist() == [-1.0, -1.0, -1.0]
    tis = token_loss(old, old, sampled, advantage, LossConfig(tis=2.0))
    torch.testing.assert_close(tis.loss, torch.tensor([-1.5, -2.0, -0.1]))
    masked = token_loss(old, old, sampled, advantage, LossConfig(mask_low=0.5, mask_high=5.0))
    assert masked.loss.tolist() == [-1.0, 0.0, 0.0]
    assert masked.masked.tolist() == [False, True, True]


def test_k3_to_a_reference_pulls_towards_it() -> None:
    p, q = torch.softmax(torch.randn(50), 0).log(), torch.softmax(torch.randn(50), 0).log()
    expected = (p.exp() * estimate_k3(p, q)).sum()
    torch.testing.assert_close(expected, (p.exp() * (p - q)).sum())
    logprobs = torch.tensor([-1.0], requires_grad=True)
    parts = token_loss(
        logprobs,
        logprobs.detach(),
        logprobs.detach(),
        torch.zeros(1),
        LossConfig(kl=0.5),
        torch.tensor([-2.0]),
    )
    parts.loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * (1 - math.exp(-1)))
    assert parts.kl.item() == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_their_gradients(temperature: float) -> None:
    hidden, head = torch.randn(37, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    targets, weight = torch.randint(0, 50, (37,)), torch.randn(37)
    logits = 5.0 * torch.tanh(hidden @ head.T / 5.0) / temperature
    wanted = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    (wanted * weight).sum().backward()
    grads = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    found, entropy = token_log_probs(hidden, head, targets, 5.0, temperature)
    (found * weight).sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close((hidden.grad, head.grad), grads, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize(
    "bad",
    [
        {"updates": 0},
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"tis": math.nan},
        {"mask_low": 2.0, "mask_high": 1.0},
    ],
)
def test_impossible_settings_are_named(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LossConfig(**bad)
