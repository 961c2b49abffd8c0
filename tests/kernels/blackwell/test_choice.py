"""Who multiplies: the reasons, the forced choices, and layers that give the same either way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nybble.errors import NybbleError
from nybble.kernels import blackwell, reference_only
from nybble.kernels.blackwell import choice
from nybble.layers import convert, refresh, set_step

CUDA = torch.device("cuda:0")
FORWARD = {"format": "mxfp8", "rounding": "stochastic", "source": "forward"}
INKLING = {
    "rule": [{"modules": "**", "fprop": "nvfp4", "dgrad": {"dy": "mxfp8", "w": FORWARD},
              "wgrad": {"dy": "mxfp8", "x": FORWARD}}]
}  # fmt: skip
ALL = {name: {"rule": [{"modules": "**", "all": name}]} for name in ("nvfp4", "mxfp8")}
TILE = {"format": "nvfp4-16x16", "source": "forward"}
SQUARE = {
    "rule": [{"modules": "**", "fprop": {"x": "nvfp4", "w": "nvfp4-16x16"},
              "dgrad": {"dy": "nvfp4", "w": TILE}, "wgrad": "nvfp4"}]
}  # fmt: skip
RECIPES = {
    name: {**rules, "blocks": {"tails": "allow"}}
    for name, rules in {"inkling": INKLING, **ALL, "square": SQUARE}.items()
}


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that a GPU of some compute capability is here."""

    def make(capability=(10, 0), cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        choice._device_reason_once.cache_clear()

    yield make
    choice._device_reason_once.cache_clear()


@pytest.mark.parametrize(
    ("capability", "cuda", "arguments", "reason"),
    [
        ((10, 0), "13.0", ("nvfp4",), None),
        ((10, 0), "12.8", ("nvfp4-16x16", "nvfp4", "rows", 16), None),
        ((10, 3), "13.0", ("mxfp8", "mxfp8-floor", "columns", 16), None),
        ((12, 0), "13.0", ("mxfp8",), None),
        ((12, 0), "13.0", ("mxfp8", None, "rows"), "grouped products need compute capability 10, not 12.0"),
        ((9, 0), "13.0", ("nvfp4",), "compute capability 9.0 is below 10.0"),
        ((10, 0), "12.6", ("nvfp4",), "CUDA 12.6 is older than 12.8"),
        ((10, 0), None, ("nvfp4",), "torch was not built for NVIDIA GPUs"),
        ((10, 0), "13.0", ("mxfp8", None, "rows", 1025), "1025 groups are more than the 1024"),
        ((10, 0), "13.0", ("nvfp4", "mxfp8"), "nvfp4 and mxfp8 have different elements"),
        ((10, 0), "13.0", ("nvfp4", None, "columns"), "start every 16 values"),
        ((10, 0), "13.0", ("mxfp4",), "mxfp4 has no native product here"),
        ((10, 0), "13.0", ("fp8-row",), "fp8-row has no native product here"),
        ((10, 0), "13.0", ("mxfp8", "bf16"), "bf16 has no native product here"),
    ],
)  # fmt: skip
def test_reasons(capability, cuda, arguments, reason, gpu):
    gpu(capability, cuda)
    got = blackwell.can_run(CUDA, *arguments)
    assert got is None if reason is None else reason in got


def test_a_torch_without_the_function_is_named(gpu, monkeypatch):
    gpu()
    monkeypatch.delattr(F, "scaled_grouped_mm")
    assert blackwell.can_run(CUDA, "mxfp8") is None
    assert "has no torch.nn.functional.scaled_grouped_mm" in blackwell.can_run(CUDA, "mxfp8", grouped="rows")


def test_what_does_not_exist_is_refused():
    with pytest.raises(NybbleError, match="unknown format"):
        blackwell.can_run("cpu", "nvfp5")
    with pytest.raises(NybbleError, match="grouped is None"):
        blackwell.can_run("cpu", "nvfp4", grouped="experts")
    with pytest.raises(NybbleError, match="choose one of auto, native, dequantise"), blackwell.kernel("fast"):
        pass


def test_the_status_is_said_once_when_the_path_is_taken(gpu, caplog):
    gpu()
    for _ in range(3):
        assert blackwell.chosen(CUDA, "nvfp4", "nvfp4")
    assert [r.message for r in caplog.records].count(f"products on cuda:0: {blackwell.STATUS}") == 1
    assert "not yet run on this hardware" in blackwell.STATUS


def test_choices(gpu):
    gpu()
    assert blackwell.chosen(CUDA, "mxfp8", "mxfp8")
    assert not blackwell.chosen(CUDA, "bf16", "bf16")
    with blackwell.kernel("dequantise"):
        assert not blackwell.chosen(CUDA, "mxfp8", "mxfp8")
    with reference_only():
        assert not blackwell.chosen(CUDA, "mxfp8", "mxfp8")
    gpu((9, 0))
    assert not blackwell.chosen(CUDA, "mxfp8", "mxfp8")
    with (
        blackwell.kernel("native"),
        pytest.raises(NybbleError, match=r"on cuda:0: compute capability 9\.0 is below"),
    ):
        blackwell.chosen(CUDA, "mxfp8", "mxfp8")


def test_a_forced_layer_says_why_it_cannot():
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, INKLING)
    with blackwell.kernel("native"), pytest.raises(NybbleError, match="cpu is not a CUDA device"):
        model(torch.randn(4, 32))
    model(torch.randn(4, 32))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 48) / 7)
        self.down_proj = nn.Parameter(torch.randn(4, 48, 32) / 6)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


def step(model, inputs, kernel, fresh=False):
    """Output and gradients of one step."""
    with blackwell.kernel(kernel):
        set_step(model, 3)
        if fresh:
            refresh(model)
        model.zero_grad()
        x = inputs[0].clone().requires_grad_()
        y = model(x, *inputs[1:])
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def both(model, inputs, fresh=False):
    """The same step on values and on codes."""
    return step(model, inputs, "dequantise", fresh), step(model, inputs, "native", fresh)


def close(a, b, limit):
    for want, got in zip(a, b, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_linear_layer_gives_the_same_from_codes(name, fresh, fake):
    model = nn.Linear(48, 80)
    convert(wrapped := nn.ModuleDict({"layer": model}), RECIPES[name])
    assert wrapped["layer"] is model
    plain, native = both(model, [torch.randn(37, 48)], fresh)
    close(plain, native, 2e-6)
    assert fake.calls == ["scaled_mm"] * 3


@pytest.mark.parametrize("name", ["inkling", "mxfp8"])
@pytest.mark.parametrize("fresh", [False, True])
def test_experts_give_the_same_from_codes(name, fresh, fake):
    experts = Experts()
    convert(nn.ModuleDict({"experts": experts}), RECIPES[name])
    index = torch.randint(0, 3, (45, 2))  # the fourth expert has no tokens
    inputs = [torch.randn(45, 48), index, torch.rand(45, 2)]
    fake.exact = True  # BF16 products would change what is quantised next
    plain, native = both(experts, inputs, fresh)
    close(plain, native, 1e-5)
    assert set(fake.calls) == {"scaled_grouped_mm"}
    assert len(fake.calls) >= 6
    assert not native[2][3].any()
    fake.exact = False
    close(plain, both(experts, inputs)[1], 0.05)


def test_experts_ask_for_grouped_products_in_every_gemm(monkeypatch):
    # A GPU may have products and no grouped ones.
    asked = []
    monkeypatch.setattr(blackwell, "chosen", lambda *arguments: asked.append(arguments[3:]))
    experts = Experts()
    convert(nn.ModuleDict({"experts": experts}), RECIPES["inkling"])
    step(experts, [torch.randn(9, 48), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)], "auto", fresh=True)
    assert set(asked) == {("rows", 4), ("columns", 4)}
    assert asked.count(("columns", 4)) == 2


def test_what_the_kernel_cannot_do_is_dequantised_within_one_layer(fake, monkeypatch):
    # NVFP4 along grouped tokens has no kernel: fprop and dgrad run on codes, wgrad does not.
    monkeypatch.setattr(blackwell, "chosen", _auto)
    experts = Experts()
    convert(nn.ModuleDict({"experts": experts}), RECIPES["square"])
    inputs = [torch.randn(45, 48), torch.randint(0, 4, (45, 2)), torch.rand(45, 2)]
    fake.exact = True
    got = step(experts, inputs, "auto")
    calls = len(fake.calls)
    monkeypatch.undo()
    close(step(experts, inputs, "dequantise"), got, 1e-5)
    assert calls >= 4


@pytest.mark.parametrize("fresh", [False, True])
def test_a_weight_that_one_pass_takes_as_codes_and_the_other_as_values(fresh, fake, monkeypatch):
    # Both passes use the same square blocks, but dy is MXFP8: dgrad must not find the codes of fprop.
    monkeypatch.setattr(blackwell, "chosen", _auto)
    rules = {"modules": "**", "fprop": {"x": "nvfp4", "w": "nvfp4-16x16"}, "wgrad": "mxfp8"}
    layer = nn.Linear(64, 32)
    convert(nn.ModuleDict({"layer": layer}), {"rule": [{**rules, "dgrad": {"dy": "mxfp8", "w": TILE}}]})
    inputs = [torch.randn(32, 64)]
    got = step(layer, inputs, "auto", fresh)
    assert fake.calls == ["scaled_mm"] * 2
    monkeypatch.undo()
    close(step(layer, inputs, "dequantise"), got, 2e-6)


def _auto(device, a, b, grouped=None, groups=0):
    return blackwell.can_run(device, a, b, grouped, groups) is None


def test_a_compiled_graph_asks_without_a_graph_break():
    x = torch.randn(4, 32)

    def ask(x):
        return x + 1 if blackwell.can_run(x.device, "nvfp4", grouped="rows") is None else x - 1

    assert torch.equal(torch.compile(ask, fullgraph=True, backend="eager")(x), x - 1)
