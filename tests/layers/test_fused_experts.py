"""The passes of experts that GPUs run, in plain torch on a CPU: same operands, and results that agree."""

import pytest
import torch
from test_experts_layer import INKLING, E, experts, inputs, step

from nybble.formats.grouped import group_slices
from nybble.kernels import fused, hopper
from nybble.layers import expert_pass, fused_experts
from nybble.layers import experts as experts_module
from nybble.recipes import load_recipe

BF16 = torch.bfloat16
PLAIN = {"rule": [{"modules": "**", "all": "bf16"}]}
MXFP8 = {"rule": [{"modules": "**", "kind": "experts", "all": "mxfp8"}]}
HOPPER = {"rule": load_recipe("hopper").to_dict()["rule"][:1]}
LAST_OF_HOPPER = {
    "rule": [{k: v for k, v in load_recipe("hopper").to_dict()["rule"][1].items() if k != "layers"}]
}
NVIDIA = {"rule": load_recipe("nvidia").to_dict()["rule"][:1]}
QUARTET = {"rule": load_recipe("quartet2").to_dict()["rule"][:1]}
TURNED = {"format": "mxfp8", "hadamard": 32}
MXFP8_TURNED = {"rule": [{"modules": "**", "fprop": "mxfp8", "dgrad": TURNED, "wgrad": TURNED}]}
STOCHASTIC_DY = {
    "rule": [
        {**INKLING["rule"][0], "wgrad": {"dy": {"format": "mxfp8", "rounding": "stochastic"}, "x": "mxfp8"}}
    ]
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products in BF16 and the fused passes, on this device."""
    calls = []

    def compute(*_args, **_named):
        return BF16

    class Counted(fused_experts.FusedExperts):
        @staticmethod
        def forward(ctx, *args):
            calls.append(1)
            return fused_experts.FusedExperts.forward(ctx, *args)

    for module in (fused_experts, expert_pass):
        monkeypatch.setattr(module, "compute_dtype", compute)
    monkeypatch.setattr(experts_module, "fits", lambda *_: True)
    monkeypatch.setattr(experts_module, "FusedExperts", Counted)
    yield
    assert calls


def bf16(args):
    x, index, w, dy = args
    return x.detach().to(BF16).requires_grad_(), index, w, dy.to(BF16)


def both(recipe, args, keep="recompute", maker="ours"):
    """(fused, plain): one module each, since operands are kept by step."""
    fused = step(experts(recipe, maker, keep), *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_module, "fits", lambda *_: False)
        plain = step(experts(recipe, maker, keep), *args)
    return fused, plain


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("recipe", "decibels", "maker"),
    [
        (PLAIN, 40, "ours"),
        (PLAIN, 40, "qwen"),
        (MXFP8, 30, "ours"),
        (INKLING, 25, "ours"),
        (INKLING, 25, "qwen"),
        (STOCHASTIC_DY, 25, "ours"),
        (HOPPER, 25, "ours"),
        (NVIDIA, 20, "ours"),
        (QUARTET, 20, "ours"),
        (MXFP8_TURNED, 30, "ours"),
    ],
    ids=[
        *("bf16", "bf16-silu", "mxfp8", "inkling", "inkling-silu", "stochastic-dy", "hopper"),
        *("nvidia", "quartet2", "mxfp8-turned"),
    ],
)
def test_fused_passes_agree_with_the_plain_ones(recipe, decibels, maker, sqnr):
    """Products rounded to BF16 move a few values over a rounding boundary; a wrong operand would show."""
    args = bf16(inputs(T=75))
    for a, b in zip(*both(recipe, args, maker=maker), strict=True):
        assert a.dtype == b.dtype
        assert sqnr(a.float(), b.float()) > decibels


@pytest.mark.usefixtures("as_on_a_gpu")
def test_routing_weights_of_one_choice_reach_kernels_in_one_piece(monkeypatch):
    """Kernels read them in their order in memory, and a column of a matrix is flattened without a copy."""
    x, index, w, dy = bf16(inputs())
    apart = w.detach()[:, :1]
    taken = []

    def row_factors(*args, plain=fused.row_factors):
        taken.extend(arg.is_contiguous() for arg in args if isinstance(arg, torch.Tensor))
        return plain(*args)

    monkeypatch.setattr(fused, "row_factors", row_factors)
    step(experts(INKLING), x, index[:, :1], apart.requires_grad_(), dy)
    assert taken
    assert all(taken)


@pytest.fixture
def fp8_products(as_on_a_gpu, monkeypatch):  # noqa: ARG001 -- what it patches is patched again
    """Products of operands in fp8-row on their codes, in FP32 here."""

    def compute(_device, a, b, *_):
        return hopper.FP8 if a.format == b.format == hopper.FORMAT else BF16

    def values(x, scales=None):
        return x.codes.float() if scales is None else x.codes.float() * scales[..., None]

    used = set()

    def of_rows(a, w, offs):
        used.add("rows")
        x, m = values(a, a.scales), values(w, w.scales)
        x = x if a.index is None else x[a.index]
        out = x.new_full((x.shape[0], m.shape[1]), torch.nan)  # rows of no expert hold anything
        for g, own in enumerate(group_slices(offs)):
            out[own] = x[own] @ m[g].T
        return out.to(BF16)

    def of_groups(a, b, dtype):
        used.add("groups")
        own = group_slices(a.ends)
        scales = [None] * len(own) if a.scales is None else a.scales
        each = zip(own, scales, b.scales, strict=True)
        return torch.stack([values(a, s)[:, o] @ values(b, t)[:, o].T for o, s, t in each]).to(dtype)

    for module in (fused_experts, expert_pass):
        monkeypatch.setattr(module, "compute_dtype", compute)
    monkeypatch.setattr(hopper, "product_of_rows", of_rows)
    monkeypatch.setattr(hopper, "product_of_groups", of_groups)
    yield
    assert used == {"rows", "groups"}


@pytest.mark.usefixtures("fp8_products")
@pytest.mark.parametrize("layer", [HOPPER, LAST_OF_HOPPER], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("keep", ["recompute", "activations"])
def test_operands_in_codes_agree_with_their_values(layer, keep, sqnr):
    x, index, w, dy = bf16(inputs(T=75))
    index = index.clone()
    index[:9, 1] = E  # no expert that is here
    for a, b in zip(*both(layer, (x, index, w, dy), keep), strict=True):
        assert sqnr(a.float(), b.float()) > 25


@pytest.mark.usefixtures("fp8_products")
@pytest.mark.parametrize("layer", [HOPPER, LAST_OF_HOPPER], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "x"])
def test_codes_for_one_product_are_those_for_both(layer, frozen):
    x, index, w, dy = bf16(inputs())
    full = step(experts(layer), x, index, w, dy)
    module = experts(layer)
    if frozen == "x":
        x = x.detach()
    else:
        getattr(module, frozen).requires_grad_(False)
    part = step(module, x, index, w, dy)
    assert sum(a is None for a in part) == 1
    assert all(a is None or torch.equal(a, b) for a, b in zip(part, full, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "recipe", [PLAIN, MXFP8, INKLING, NVIDIA, QUARTET], ids=["bf16", "mxfp8", "inkling", "nvidia", "quartet2"]
)
def test_recomputing_gives_the_same_bits_as_keeping(recipe):
    args = bf16(inputs())
    kept, again = (step(experts(recipe, keep=keep), *args) for keep in ("activations", "recompute"))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("recipe", [INKLING, NVIDIA, QUARTET], ids=["inkling", "nvidia", "quartet2"])
def test_an_index_beyond_the_experts_adds_nothing(recipe, sqnr):
    x, index, w, dy = bf16(inputs())
    away = index.clone()
    away[:, 1] = E
    out, want = both(recipe, (x, away, w, dy))
    assert not out[2][:, 1].any()
    assert all(sqnr(a.float(), b.float()) > 20 for a, b in zip(out, want, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "x", "weights"])
def test_what_needs_no_gradient_gets_none_and_changes_nothing_else(frozen):
    x, index, w, dy = bf16(inputs())
    full = step(experts(), x, index, w, dy)
    module = experts()
    if frozen.endswith("proj"):
        getattr(module, frozen).requires_grad_(False)
    x = x.detach() if frozen == "x" else x
    w = w.detach() if frozen == "weights" else w
    part = step(module, x, index, w, dy)
    assert sum(a is None for a in part) == 1
    assert all(a is None or torch.equal(a, b) for a, b in zip(part, full, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_only_codes_and_routing_are_kept(saved_tensors):
    module, (x, index, w, _) = experts(), bf16(inputs(T=512))
    _, kept = saved_tensors(lambda: module(x, index, w))
    parameters = {p.data_ptr() for p in module.parameters()}
    total = sum(t.nbytes for t in kept if t.data_ptr() not in parameters and t.numel() > 4)
    R, hidden, width = 1024, 64, 32
    codes = 512 * (hidden * 4.5 / 8 + 4) + R * (width * 4.5 / 8 + 4)
    assert total == codes + 4 * R + 4 * R + 4 * R  # order, routing weight and scale of the rows


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", [INKLING, LAST_OF_HOPPER], ids=["inkling", "hopper-mxfp8"])
def test_the_compiler_sees_one_graph_with_the_bits_of_eager(recipe):
    """Of x the codes wait for the backward pass, or x itself."""
    torch._dynamo.reset()
    module, args = experts(recipe), bf16(inputs(T=40))
    plain = step(module, *args)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for t in (args[0], args[2], *module.parameters()):
        t.grad = None
    y = compiled(*args[:3])
    y.backward(args[3])
    got = [y.detach(), *(t.grad for t in (args[0], args[2], *module.parameters()))]
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    torch._dynamo.reset()
