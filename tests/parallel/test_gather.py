"""Weights of experts gathered as codes: the bytes that travel, the operands, and where gradients go."""

import pytest
import torch
import torch.distributed as dist
from layer_cases import RULE, Model, recipe

from nybble.layers import convert, set_step
from nybble.layers.weights import Weight
from nybble.parallel import Monitor, gather


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """Messages that were gathered."""
    messages, once = [], gather._all_gather

    def watched(out, message, **named):
        messages.append(message)
        return once(out, message, **named)

    monkeypatch.setattr(gather, "_all_gather", watched)
    return messages


@pytest.mark.parametrize("keep", [False, True])
def test_codes_travel_and_gradients_come_back(alone, sent, keep):
    model = Model()
    convert(model, recipe({}, RULE))
    set_step(model, 3, seed=1)
    experts = model.experts
    collect = gather.CodeGather("experts", (alone, alone), Monitor(), keep)
    _, key = experts.step_state.keys(torch.device("cpu"))
    for which, part in enumerate((experts.gate_up_proj, experts.down_proj)):
        for _ in range(2):
            whole, codes = collect(experts, part, which)
        assert whole.shape == part.shape
        want = Weight(experts.specs[which], None, None).forward_codes(part, key)
        assert all(torch.equal(a, b) for a, b in zip(codes, want, strict=True))
        gradient = torch.randn_like(part)
        whole.backward(gradient)
        assert torch.equal(part.grad, gradient)
        # 4.5 bits a value and an outer scale a matrix, to 16 bits of BF16.
        assert sent[-1].nbytes == part.numel() * 9 // 16 + 4 * len(part)
        assert sent[-1].nbytes <= 2 * part.numel() / 3.5
    assert len(sent) == (2 if keep else 4)
    set_step(model, 4)
    collect(experts, experts.down_proj, 1)
    assert len(sent) == (3 if keep else 5)  # weights may have changed


def test_what_cannot_be_gathered_as_codes_is_named():
    model = Model()
    convert(model, recipe({}, {"modules": "**", "all": "mxfp8"}))
    assert "weights are mxfp8" in str(gather.fault(model.experts, 2))
    model = Model()
    original = RULE | {"dgrad": RULE["dgrad"] | {"w": {"format": "mxfp8", "source": "original"}}}
    convert(model, recipe({}, original))
    assert "rounds the weights themselves" in str(gather.fault(model.experts, 2))
    assert "3 ranks cannot share out 4 experts" in str(gather.fault(model.experts, 3))
