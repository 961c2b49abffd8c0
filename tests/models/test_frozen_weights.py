"""Weights that are frozen cost no product of their own, and leave all other gradients as they are."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from inkling2_cases import random_ids, random_model
from torch import nn

from nybble.layers import convert, experts_by_hand, set_step
from nybble.models import logprobs
from nybble.models.inkling2 import router, whole_attention

PRODUCTS = [
    (experts_by_hand, "grouped_rows"),
    (experts_by_hand, "grouped_columns"),
    (whole_attention, "matmul"),
    (router, "tiles"),
]
LAYERS = 3


def run(
    frozen: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how many products the backward pass took."""
    torch.manual_seed(1)
    model: nn.Module = random_model()
    if recipe is not None:
        convert(model, recipe)
        set_step(model, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, f"*{part}") for part in frozen.split()))
    ids = random_ids(2, 40)
    loss = model(ids, labels=ids).loss
    count = 0

    def counted(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return product(*arguments)

        return call

    with monkeypatch.context() as patch:
        for module, name in PRODUCTS:
            patch.setattr(module, name, counted(getattr(module, name)))
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, count


@pytest.mark.parametrize(
    ("recipe", "frozen", "fewer"),
    [
        (None, "gate_up_proj", LAYERS),
        (None, "down_proj", LAYERS),
        (None, "mlp.gate.weight", LAYERS),
        (None, "o_proj.linear.weight", LAYERS),
        (None, "o_proj.linear.weight q_proj.linear.weight", LAYERS),  # others take the product with q_proj
        (None, "self_attn.*.weight", LAYERS + 5),  # 5 inputs of projections: 1, 1 and 3 in the full layer
        ("bf16", "gate_up_proj down_proj", 2 * LAYERS),
        ("bf16", "sconv.conv1d.weight", 0),
    ],
)
def test_frozen_weights(recipe: str | None, frozen: str, fewer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every, all_products = run("", recipe, monkeypatch)
    some, products = run(frozen, recipe, monkeypatch)
    assert 0 < len(some) < len(every)
    assert all(torch.equal(gradient, every[name]) for name, gradient in some.items())
    assert products == all_products - fewer


def test_a_frozen_head_has_no_gradient_of_log_probabilities() -> None:
    hidden, head, targets = torch.randn(9, 8), torch.randn(20, 8), torch.arange(9)
    found = []
    for needs in (True, False):
        x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(needs)
        logprobs.token_log_probs(x, w, targets, 5.0)[0].sum().backward()
        found.append(x.grad)
        assert (w.grad is None) is not needs
    assert torch.equal(*found)
