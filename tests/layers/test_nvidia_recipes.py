"""Layers of the NVFP4 recipes: what their transformed, re-rounded and centred operands add up to."""

import copy

import pytest
import torch
from torch import nn

from nybble.formats import get, ops, reference
from nybble.formats.outer import decode_scale
from nybble.layers import convert, set_step
from nybble.recipes import Recipe, load_recipe

SEED, STEP = 5, 7
TRANSFORMED = {"rule": [{"modules": "**", "wgrad": {
    "dy": {"format": "nvfp4", "rounding": "stochastic", "hadamard": 16},
    "x": {"format": "nvfp4", "hadamard": 16},
}}]}  # fmt: skip
EDEN = {"format": "nvfp4", "rounding": "eden", "hadamard": 128, "signs": "drawn"}
QUARTET = {"rule": [{"modules": "**", "fprop": "nvfp4-4over6",
                     "dgrad": {"dy": EDEN, "w": EDEN | {"source": "forward"}},
                     "wgrad": {"dy": EDEN, "x": EDEN | {"source": "forward"}}}]}  # fmt: skip

FROM_FORWARD = {"format": "fp32", "source": "forward"}
EXACT = {"rule": [{"modules": "**", "fprop": "nvfp4-4over6", "dgrad": {"dy": "fp32", "w": FROM_FORWARD},
                   "wgrad": {"dy": "fp32", "x": FROM_FORWARD}}]}  # fmt: skip


def linear(recipe, K=64, N=96, bias=False):
    model = nn.Sequential(nn.Linear(K, N, bias=bias))
    convert(model, recipe)
    set_step(model, STEP, 0, seed=SEED)
    return model[0]


def gradients(layer, x, dy, step=STEP):
    set_step(layer, step, 0, seed=SEED)
    layer.weight.grad = None
    x = x.clone().requires_grad_()
    layer(x).backward(dy)
    return x.grad, layer.weight.grad


def test_wgrad_is_the_product_of_transformed_then_quantised_operands():
    """37 tokens: the last run is short, and its padding adds nothing."""
    lin = linear(TRANSFORMED)
    x, dy = torch.randn(37, 64), torch.randn(37, 96)
    key = torch.tensor([SEED, STEP, 0])

    def operand(t, *draw):
        values, amax = reference.fake_quantize(ops.hadamard(t, -2, 16), "nvfp4", torch.float32, -2, *draw)
        return values, decode_scale(get("nvfp4"), amax)

    a, a_scale = operand(dy, "stochastic", "matrix", key, 0, 4)
    b, b_scale = operand(x.bfloat16(), "nearest", "matrix")
    assert torch.equal(gradients(lin, x, dy)[1], (a.t() @ b) * (a_scale * b_scale))


def test_a_transform_alone_leaves_gradients_as_they_were():
    """BF16 operands that hold the transform exactly: a power of two in each run."""
    plain = {"format": "fp32", "hadamard": 16}
    lin = linear({"rule": [{"modules": "**", "all": "fp32", "wgrad": plain, "dgrad": plain}]})
    reference_layer = copy.deepcopy(lin)
    convert(nn.Sequential(reference_layer), {"rule": [{"modules": "**", "all": "fp32"}]})
    x, dy = torch.randn(37, 64), torch.randn(37, 96)
    for ours, theirs in zip(gradients(lin, x, dy), gradients(reference_layer, x, dy), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_quartet2_gradients_average_to_those_of_the_forward_tensors(kind, make_model):
    """Over signs and draws the error of the mean falls as one over the root of their number."""
    n = 48
    if kind == "linear":
        layer, x, dy = linear(QUARTET, 64, 96), torch.randn(40, 64), torch.randn(40, 96)
        exact = linear(EXACT, 64, 96)
        exact.load_state_dict(layer.state_dict())
        got = [gradients(layer, x, dy, step) for step in range(n)]
        want = gradients(exact, x, dy)
    else:
        got, want = _expert_gradients(make_model, n)
    for each, truth in zip(zip(*got, strict=True), want, strict=True):
        single = torch.stack([(g - truth).norm() for g in each]).mean() / truth.norm()
        mean = (torch.stack(each).mean(0) - truth).norm() / truth.norm()
        assert 0.02 < single < 0.4
        assert mean < 2 * single / n**0.5


def _expert_gradients(make_model, n):
    def run(recipe, steps):
        model = make_model("qwen3-moe")
        experts = nn.ModuleDict({"experts": model.model.layers[0].mlp.experts})
        convert(experts, recipe)
        torch.manual_seed(3)
        x, dy = torch.randn(30, 64), torch.randn(30, 64)
        index = torch.stack([torch.randperm(4)[:2] for _ in range(30)])
        weights = torch.full((30, 2), 0.5)
        found = []
        for step in range(steps):
            set_step(experts, step, 0, seed=SEED)
            experts.zero_grad()
            inside = x.clone().requires_grad_()
            experts["experts"](inside, index, weights).backward(dy)
            found.append((inside.grad, *(p.grad for p in experts.parameters())))
        return found

    return run(QUARTET, n), run(EXACT, 1)[0]


@pytest.mark.parametrize("cache", ["codes", "values", "none"])
def test_what_is_kept_of_a_transformed_weight_changes_nothing(cache):
    recipe = QUARTET | {"weights": {"cache": cache}}
    torch.manual_seed(1)
    lin = linear(recipe, 64, 96)
    torch.manual_seed(1)
    other = linear(QUARTET | {"weights": {"cache": "auto"}}, 64, 96)
    x, dy = torch.randn(40, 64), torch.randn(40, 96)
    for ours, theirs in zip(gradients(lin, x, dy), gradients(other, x, dy), strict=True):
        assert torch.equal(ours, theirs)


def test_a_mean_that_dwarfs_the_rest_costs_no_precision_once_it_is_subtracted():
    x = torch.randn(48, 64) + 50 * torch.randn(64)
    dy = torch.randn(48, 96)
    errors = {}
    for flag in (False, True):
        x_operand = {"format": "nvfp4", "subtract_mean": flag}
        torch.manual_seed(2)
        lin = linear(
            {"rule": [{"modules": "**", "fprop": {"x": x_operand}, "wgrad": {"x": x_operand}}]}, bias=True
        )
        y = lin(x)
        (dw,) = torch.autograd.grad(y, lin.weight, dy)
        truth = x @ lin.weight.detach().t() + lin.bias.detach()
        errors[flag] = ((y - truth).norm() / truth.norm(), (dw - dy.t() @ x).norm() / (dy.t() @ x).norm())
    assert errors[True][0] < 0.02
    assert all(centred < 0.2 * plain for centred, plain in zip(errors[True], errors[False], strict=True))


@pytest.mark.parametrize("recipe", ["nvidia", QUARTET, {"rule": [
    {"modules": "**", "fprop": {"x": {"format": "nvfp4", "subtract_mean": True}},
     "wgrad": {"x": {"format": "nvfp4", "subtract_mean": True}}}]}])  # fmt: skip
def test_no_tokens_give_a_gradient_of_zero(recipe):
    recipe = load_recipe(recipe)
    model = nn.Sequential(nn.Linear(64, 96))
    convert(model, Recipe(name="all", rules=recipe.rules[:1]))
    model(torch.zeros(0, 64)).sum().backward()
    assert not model[0].weight.grad.any()


@pytest.mark.parametrize("recipe", ["nvidia", "nvidia-4over6", "quartet2", "nvfp4-all-naive"])
def test_every_recipe_trains_dense_and_expert_layers(recipe, make_model):
    model = make_model("our-inkling2")
    report = convert(model, recipe)
    ids = torch.randint(0, 128, (2, 21))
    set_step(model, 0)
    loss = model(ids, shift_labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert "nvfp4" in report.table()


def test_nvidia_keeps_the_first_and_last_blocks_by_fraction():
    """2 and 8 of 62, and at least one of either in a small model."""
    first, last = (rule.layers for rule in load_recipe("nvidia").rules[1:3])
    assert [(first.size(n), last.size(n)) for n in (62, 31, 12, 6)] == [(2, 8), (1, 4), (1, 2), (1, 1)]


def test_experts_and_copies_of_them_change_with_the_schedule(make_model):
    """What a layer computes with after the switch is what it would have without one."""
    rules = [
        {"modules": "**.experts", "fprop": "nvfp4"},
        {"modules": "**.experts", "fprop": "mxfp8", "after": 4},
    ]
    ids = torch.randint(0, 128, (1, 16))
    scheduled, late = make_model("our-inkling2"), make_model("our-inkling2")
    convert(scheduled, {"rule": rules})
    convert(late, {"rule": [{"modules": "**.experts", "fprop": "mxfp8"}]})
    scheduled = copy.deepcopy(scheduled)
    losses = []
    for step in (3, 4, 3):
        for model in (scheduled, late):
            set_step(model, step)
            losses.append(model(ids, shift_labels=ids).loss.item())
    assert losses[2] == losses[3]
    assert losses[0] == losses[4] != losses[1]
