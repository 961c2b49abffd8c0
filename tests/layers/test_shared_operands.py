"""Layers that read one tensor quantise it once, and never take what was made of another."""

import pickle

import pytest
import torch
from torch import nn

import nybble
from nybble.layers import set_step


class Two(nn.Module):
    def __init__(self, H=32):
        super().__init__()
        self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x):
        return self.a(x) + self.b(x)


def calls(monkeypatch):
    """How often a tensor was quantised, in a list of one number."""
    count = [0]
    import nybble.layers.kept as kept

    plain = kept.cast

    def counted(*arguments, **named):
        count[0] += 1
        return plain(*arguments, **named)

    monkeypatch.setattr(kept, "cast", counted)
    return count


def test_two_projections_of_a_tensor_share_its_operands_and_a_changed_one_is_made_again(monkeypatch):
    torch.manual_seed(0)
    model = Two()
    nybble.convert(model, "mxfp8")
    x = torch.randn(64, 32)
    set_step(model, 0)
    count = calls(monkeypatch)
    y = model(x)
    assert count[0] == 1
    y.sum().backward()
    assert count[0] == 2  # once more along the tokens
    with torch.no_grad():
        first = model(x)
        x *= 2.0
        assert count[0] == 3
        assert not torch.equal(model(x), first)
    assert count[0] == 4
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "fp8"])
def test_shared_operands_are_those_made_alone(recipe, monkeypatch):
    from nybble.layers.shared import LastOperand

    results = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(LastOperand, "get", lambda _self, _x, _spec, _what, make: make())
        torch.manual_seed(0)
        model = nn.Sequential(Two(), Two())
        nybble.convert(model, recipe)
        set_step(model, 0)
        x = torch.randn(64, 32, requires_grad=True)
        model(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
