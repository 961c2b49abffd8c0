"""Steps launched as CUDA graphs are those launched one kernel at a time."""

from functools import partial

import pytest
import torch

from nybble.layers import convert, set_step
from nybble.models import Inkling2ForCausalLM, presets
from nybble.pretrain.captured import Captured, restore


def test_warm_up_passes_leave_buffers_as_they_were():
    model = Inkling2ForCausalLM(presets.get("tiny").model_config(num_hidden_layers=2))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64))
    assert model.expert_load.any()
    restore(model, kept)
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["bf16", "inkling", "hopper", "nvidia", "later"])
def test_captured_steps_have_the_losses_and_gradients_of_eager_ones(recipe):
    """Two optimiser steps of two micro-batches, with a validation after each: draws and weights move on,
    gradients do not pile up, and a recipe that changes at the second step does so.
    """
    if recipe == "later":
        rules = [{"modules": "**", "all": "mxfp4"}, {"modules": "**", "all": "bf16", "after": 1}]
        recipe = {"blocks": {"tails": "allow"}, "rule": rules}

    def made():
        torch.manual_seed(0)
        model = Inkling2ForCausalLM(presets.get("tiny").model_config()).cuda().train()
        convert(model, recipe, steps=2)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    gen = torch.Generator().manual_seed(1)
    steps = [
        [{"ids": torch.randint(4096, (2, 128), generator=gen).cuda()} for _ in range(2)] for _ in range(2)
    ]
    (plain, optimiser), (model, other) = made(), made()

    def loss(net, batch):
        return net(batch["ids"], labels=batch["ids"]).loss

    captured = Captured(model, partial(loss, model), partial(set_step, model))
    for step, batches in enumerate(steps):
        want = torch.zeros((), device="cuda")
        for micro, batch in enumerate(batches):
            set_step(plain, step, micro)
            part = loss(plain, batch) / 2
            part.backward()
            want += part.detach()
        got = captured(batches, step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)  # atomic additions of the attention
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-2 * b.grad.norm() + 1e-7, name
        for o in (optimiser, other):
            o.step()
            o.zero_grad(set_to_none=True)
        held_out = {"ids": batches[0]["ids"].flip(0)}
        for net in (plain, model):
            net.eval()
            set_step(net, step, 1)
        with torch.no_grad():
            torch.testing.assert_close(
                captured.evaluate(held_out, step, 1), loss(plain, held_out), rtol=1e-4, atol=0
            )
        for net in (plain, model):
            net.train()
