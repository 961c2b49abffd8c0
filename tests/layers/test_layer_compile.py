"""torch.compile sees whole layers: one graph, the bits of eager, and a step that is not baked in."""

import pytest
import torch
from torch import nn

from nybble.layers import convert, refresh, set_step

FORWARD = {"format": "mxfp8", "rounding": "stochastic", "source": "forward"}
# torch's tracer instantiates autograd.Function, against which torch itself warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

RULE = {
    "modules": "**",
    "fprop": "nvfp4",
    "dgrad": {"dy": "mxfp8", "w": FORWARD},
    "wgrad": {"dy": "mxfp8", "x": FORWARD},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Softcapped(nn.Module):
    """That of Inkling 2 in plain torch: a CPU kernel would differ from a compiled one by a bit."""

    gate_cap, up_cap = 4.0, 25.0

    def forward(self, gate, up):
        return 100.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * torch.tanh(up / 25.0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 32) * 0.2)
        self.act_fn = Softcapped()


class Block(nn.Module):
    """A linear layer and experts, with their routing."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.experts = Experts()

    def forward(self, x, scores):
        w, index = torch.topk(scores, 2)
        return self.experts(self.proj(x), index, torch.sigmoid(w))


def run(block, forward, x, scores):
    for p in block.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    if scores is not None:
        torch._dynamo.mark_dynamic(x, 0)
    y = forward(x, scores)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_one_graph_with_the_bits_of_eager_for_every_step_and_size():
    block = Block()
    convert(block, {"rule": [RULE]})
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, example)

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x, scores = torch.randn(40, 64), torch.randn(40, 4)
    dx = {}
    for step, tokens in ((0, 24), (1, 24), (0, 33), (2, 40)):
        set_step(block, step, micro=0, seed=1)
        some = scores[:tokens].clone()
        torch._dynamo.mark_dynamic(some, 0)
        out = run(block, compiled, x[:tokens], some)
        assert same(out, run(block, block, x[:tokens], scores[:tokens])), step
        dx[step, tokens] = out[1]
    assert not torch.equal(dx[0, 24], dx[1, 24])  # the draws moved on
    assert len(graphs) == 1


def test_refreshed_weights_serve_a_compiled_graph_until_the_next_step():
    block = nn.Sequential(nn.Linear(64, 64))
    convert(block, {"rule": [RULE]})
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(24, 64)

    def quantise_calls(call):
        with torch.profiler.profile() as profile:
            out = call()
        return out, sum(e.count for e in profile.key_averages() if "quantize" in e.key and "nybble" in e.key)

    def both(forward):
        return lambda x, _: forward(x)

    run(block, both(compiled), x, None)
    for step in range(2):
        set_step(block, step, seed=1)
        expected, plain = quantise_calls(lambda: run(block, both(compiled), x, None))
        refresh(block)
        run(block, both(compiled), x, None)
        got, refreshed = quantise_calls(lambda: run(block, both(compiled), x, None))
        # quantised for fprop, again for dgrad, and re-rounded there: none of that is left
        assert refreshed == plain - 3
        assert same(got, expected)
        with torch.no_grad():
            block[0].weight.mul_(1.1)


def test_a_compiled_backward_pass_draws_from_the_key_of_its_forward_pass():
    block = nn.Sequential(nn.Linear(64, 64))
    convert(block, {"rule": [RULE]})
    compiled, x = torch.compile(block, backend="aot_eager", fullgraph=True), torch.randn(24, 64)
    set_step(block, 0)
    alone = run(block, lambda x, _: compiled(x), x, None)

    def overtaken(x, _):
        y = compiled(x)
        set_step(block, 1)
        return y

    set_step(block, 0)
    assert same(run(block, overtaken, x, None), alone)
