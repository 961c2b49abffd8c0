"""Weights are quantised once a step, and no operand outlives the weight that it was made from."""

import pytest
import torch
from torch import nn

from nybble.layers import convert, refresh, set_step
from nybble.layers import weights as weights_module
from nybble.layers.weights import Weight

FORWARD = {"format": "mxfp8", "rounding": "stochastic", "source": "forward"}
RULE = {
    "modules": "**",
    "fprop": "nvfp4",
    "dgrad": {"dy": "mxfp8", "w": FORWARD},
    "wgrad": {"dy": "mxfp8", "x": FORWARD},
}

MATRIX = {"format": "nvfp4", "outer": "matrix"}
EDEN = {"format": "nvfp4", "rounding": "eden", "hadamard": 128, "signs": "drawn"}
PARTS = {
    "inkling": {"fprop": {"x": "nvfp4", "w": MATRIX}, "dgrad": {"dy": "mxfp8", "w": FORWARD}},
    "quartet2": {
        "fprop": {"x": "nvfp4", "w": {**MATRIX, "rounding": "stochastic"}},
        "dgrad": {"dy": EDEN, "w": {**EDEN, "outer": "matrix", "source": "forward"}},
    },
}


def model(cache="auto"):
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    convert(net, {"rule": [RULE], "weights": {"cache": cache}})
    return net


def run(net, x):
    net.zero_grad()
    x = x.detach().requires_grad_()
    y = net(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def uncached(net, x):
    """The same pass with nothing kept."""
    modes = [layer.weight_cache.mode for layer in net]
    for layer in net:
        layer.weight_cache.mode = "none"
    out = run(net, x)
    for layer, mode in zip(net, modes, strict=True):
        layer.weight_cache.mode = mode
    return out


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("cache", ["auto", "values", "codes", "none"])
def test_kept_operands_change_no_bit(cache):
    net, x = model(cache), torch.randn(32, 64)
    for step in range(2):
        for micro in range(2):
            set_step(net, step, micro, seed=1)
            out = run(net, x)
            assert same(out, uncached(net, x))


@pytest.mark.parametrize(("cache", "again"), [("values", 0), ("codes", 0), ("none", 4)])
def test_a_second_micro_batch_quantises_no_weight(cache, again, monkeypatch):
    net, x = model(cache), torch.randn(32, 64)
    made = []
    for name in ("cast", "encode", "recast"):
        inner = getattr(weights_module, name)
        monkeypatch.setattr(weights_module, name, lambda *a, f=inner, n=name: (made.append(n), f(*a))[1])
    set_step(net, 0, 0)
    run(net, x)
    assert len(made) >= 4
    made.clear()
    set_step(net, 0, 1)
    run(net, x)
    assert len([n for n in made if n != "encode"]) == again
    made.clear()
    set_step(net, 1, 0)
    run(net, x)
    assert len(made) >= 4


def in_place(net):
    with torch.no_grad():
        net[0].weight.mul_(1.5)


def behind_autograd(net):
    net[0].weight.data.mul_(1.5)
    set_step(net, 1)


def optimiser(net):
    torch.optim.AdamW(net.parameters(), lr=0.1).step()


def load(net):
    net.load_state_dict({name: value * 1.5 for name, value in net.state_dict().items()})


def replace_data(net):
    net[0].weight.data = net[0].weight.data * 1.5


def replace_parameter(net):
    net[0].weight = nn.Parameter(net[0].weight.detach() * 1.5)


def cast_to(net):
    with torch.no_grad():
        net[0].weight.add_(torch.randn(64, 64))
    net.to(torch.bfloat16).to(torch.float32)


def second_recipe(net):
    convert(net, "mxfp4")


@pytest.mark.parametrize("cache", ["values", "codes"])
@pytest.mark.parametrize(
    "change",
    [in_place, behind_autograd, optimiser, load, replace_data, replace_parameter, cast_to, second_recipe],
)
def test_no_stale_operand_survives_a_change_of_the_weight(change, cache):
    net, x = model(cache), torch.randn(32, 64)
    set_step(net, 0)
    before = run(net, x)
    change(net)
    after = run(net, x)
    assert not torch.equal(after[0], before[0])
    assert same(after, uncached(net, x))


def test_without_set_step_nothing_is_kept():
    """A user who never heard of set_step may change weights in any way, even behind autograd."""
    net, x = model(), torch.randn(32, 64)
    before = run(net, x)
    net[0].weight.data.mul_(1.5)
    assert not torch.equal(run(net, x)[0], before[0])
    assert not net[0].weight_cache.kept


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    net, x = model(), torch.randn(32, 64, requires_grad=True)
    set_step(net, 0)
    y = net(x)
    in_place(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_codes_take_few_bytes():
    net, x = model("codes"), torch.randn(32, 64)
    set_step(net, 0)
    run(net, x)
    kept = sum(t.nbytes for codes in net[0].weight_cache.kept.values() for t in codes)
    assert kept < 64 * 64 * (4.5 + 8.25) / 8 + 16


def test_refresh_makes_what_the_passes_would_have_made():
    net, x = model(), torch.randn(32, 64)
    set_step(net, 4, seed=9)
    lazy = run(net, x)
    set_step(net, 4, seed=9)
    refresh(net)
    assert len(net[0].weight_cache.kept) == 2
    assert same(run(net, x), lazy)


@pytest.mark.parametrize("recipe", ["inkling", "quartet2"])
def test_matrices_of_a_part_have_the_operands_that_they_have_in_the_whole(recipe):
    """Also behind a Hadamard transform, which makes 128 rows of 96."""
    layer = nn.Linear(64, 96)
    convert(nn.Sequential(layer), {"rule": [{"modules": "**", **PARTS[recipe]}]})
    weight, (_, key) = torch.randn(4, 96, 64), layer.step_state.keys(torch.device("cpu"))
    for operand in ("fprop", "dgrad"):
        whole = getattr(Weight(layer.spec, None, None), operand)(weight, key, torch.float32)
        part = getattr(Weight(layer.spec, None, None, before=3), operand)(weight[3:], key, torch.float32)
        assert torch.equal(part.values, whole.values[3:])
        assert torch.equal(part.amax, whole.amax[3:] if len(whole.amax) else whole.amax)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_that_are_handed_on_are_those_of_the_values(rounding):
    net = nn.Sequential(nn.Linear(64, 32, bias=False))
    convert(net, {"rule": [{**RULE, "fprop": {"x": "nvfp4", "w": {**MATRIX, "rounding": rounding}}}]})
    weight, key = net[0].weight, torch.tensor([3, 1, 0, 0])
    operand = Weight(spec=net[0].spec, cache=None, tag=None)
    kept = {}
    values = operand._compute_with_codes(weight, key, torch.bfloat16, kept)
    want = operand._compute("fprop", weight, key, torch.bfloat16)
    assert same(values, want)
    assert same(kept["forward codes"], operand.forward_codes(weight, key))
