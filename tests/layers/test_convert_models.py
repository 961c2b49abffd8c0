"""convert on the model families: trains, saves, keeps names and ties, and never touches what must stay
precise."""

import copy
import io

import pytest
import torch
from torch import nn

from nybble.errors import NybbleError, RecipeError
from nybble.layers import Experts, Linear, convert, set_step
from nybble.recipes import load_recipe

MIXTURES = ["inkling2", "our-inkling2", "qwen3-moe", "olmoe"]
CASES = [(f, r) for f in (*MIXTURES, "llama") for r in ("mxfp8", "inkling", "inkling-4over6", "mxfp4", "fp8")]
CASES = [(f, r) for f, r in CASES if f != "llama" or not r.startswith("inkling")]
NVFP4 = {"name": "nvfp4", "rule": [{"modules": "**", "fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8"}]}

# (least, median) decibels over the gradients of all parameters against those of bf16. One MXFP8 rounding
# leaves 31 dB, one of NVFP4 20 dB, one of MXFP4 18 dB or less with stochastic rounding of gradients; several
# of them add up along a layer and over layers. The least belongs to vectors of a few dozen numbers, which see
# sums of that noise. A wrong factor, sign or axis gives 0 dB or less.
FLOORS = {
    "mxfp8": (12, 18),
    "fp8": (12, 18),
    "inkling": (5, 16),
    "inkling-4over6": (5, 16),
    "mxfp4": (0, 5),
    "nvfp4": (8, 13),
}


def train_step(model, step=3):
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(2))
    set_step(model, step)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "recipe"), [*CASES, ("llama", NVFP4)])
def test_gradients_stay_near_those_of_bf16(family, recipe, make_model, sqnr):
    # All experts for each token: one that changes its expert would hide every other error.
    model = make_model(family, top_k=4)
    convert(model, "bf16")
    exact = train_step(model)
    convert(model, recipe)
    grads = train_step(model)
    assert grads.keys() == exact.keys()
    noise = sorted(sqnr(grads[name], exact[name]) for name in exact)
    least, median = FLOORS[load_recipe(recipe).name]
    assert noise[0] >= least
    assert noise[len(noise) // 2] >= median
    assert noise[0] < 60  # something was quantised


@pytest.mark.parametrize("family", [*MIXTURES, "llama"])
def test_a_step_of_adamw_lowers_the_loss_and_folders_go_both_ways(family, make_model, tmp_path):
    """save_pretrained after conversion writes what the model's own class reads, name by name."""
    model = make_model(family)
    names = list(model.state_dict())
    convert(model, "mxfp8" if family == "llama" else "inkling")
    assert list(model.state_dict()) == names
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 128, (2, 24))
    losses = []
    for step in range(4):
        set_step(model, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    model.save_pretrained(tmp_path / "saved")
    fresh = type(model).from_pretrained(tmp_path / "saved")
    assert list(fresh.state_dict()) == names
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    convert(fresh, "mxfp8" if family == "llama" else "inkling")
    model.eval()
    fresh.eval()
    with torch.no_grad():
        assert torch.equal(fresh(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_layer_runs_quantised_gemms(family, make_model, quantise_calls):
    """A conversion that silently leaves BF16 behind would train, and be worth nothing."""
    model = make_model(family)
    report = convert(model, "inkling")
    modules = [m for m in model.modules() if isinstance(m, Experts)]
    assert len(modules) == model.config.num_hidden_layers
    for module in modules:
        x = torch.randn(8, 64, requires_grad=True)
        w = torch.rand(8, 2, requires_grad=True)
        index = torch.tensor([[0, 1]]).expand(8, 2)
        calls = quantise_calls(lambda m=module, a=(x, index, w): m(*a).sum().backward())
        quantised = sum(count for name, count in calls.items() if "quantize" in name)
        assert quantised >= 10
        assert calls["grouped_rows"] == 5 if module.specs[0].gemms.fprop.x.format == "nvfp4" else 4
        assert calls["grouped_columns"] == 2
    assert "nvfp4:row" in report.table()


@pytest.mark.parametrize("family", [*MIXTURES, "llama"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "fp8"])
def test_router_embeddings_norms_and_head_are_never_touched(family, recipe, make_model):
    model = make_model(family)
    before = {name: type(module) for name, module in model.named_modules()}
    masters = {name: (id(p), p.dtype, p.clone()) for name, p in model.named_parameters()}
    convert(model, recipe)
    changed = [name for name, module in model.named_modules() if type(module) is not before[name]]
    assert changed
    for name in changed:
        assert isinstance(model.get_submodule(name), (Linear, Experts)), name
        last = name.rsplit(".", 1)[-1]
        assert "norm" not in name and "embed" not in name and "head" not in name  # noqa: PT018
        assert last not in ("gate", "router"), name
    for name, p in model.named_parameters():
        pointer, dtype, value = masters[name]
        assert (id(p), p.dtype) == (pointer, dtype)
        assert torch.equal(p, value), name  # the optimiser's FP32 masters


def test_tied_weights_stay_tied(make_model):
    model = make_model("llama")
    convert(model, "mxfp8")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_second_recipe_replaces_the_first(make_model):
    model, other = make_model("qwen3-moe"), make_model("qwen3-moe")
    convert(model, "mxfp4")
    convert(model, "inkling")
    convert(other, "inkling")
    once, twice = train_step(other), train_step(model)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert type(model.model.layers[0].mlp.experts) is type(other.model.layers[0].mlp.experts)


def test_a_failed_conversion_changes_nothing(make_model):
    model = make_model("qwen3-moe")
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(RecipeError, match="matches no module"):
        convert(model, {"rule": [{"modules": "**", "all": "mxfp8"}, {"modules": "**.wq", "all": "bf16"}]})
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_layer_ids_are_rows_of_the_table(make_model):
    model = make_model("qwen3-moe")
    report = convert(model, "inkling")
    for layer, row in enumerate(report.resolved.rows):
        module = model.get_submodule(row.name)
        if isinstance(module, Linear):
            assert module.spec.layer == layer
        elif isinstance(module, Experts):
            assert {spec.layer for spec in module.specs} == {layer}


def test_subclasses_and_copies_survive(make_model):
    """Classes of converted modules pass isinstance checks, deepcopy and pickle."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    model = make_model("qwen3-moe")
    convert(model, "inkling")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Qwen3MoeExperts)
    grads = train_step(model)
    twin = copy.deepcopy(model)
    other = train_step(twin)
    assert all(torch.equal(grads[name], other[name]) for name in grads)
    buffer = io.BytesIO()
    torch.save(experts, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is type(experts)


def test_a_report_is_shown_in_a_line_and_misuse_gets_one():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert repr(convert(model, "mxfp8")) == "Report(recipe mxfp8, 2 modules quantised; table() shows all)"
    with pytest.raises(NybbleError, match=r"model must be a torch\.nn\.Module, not Tensor"):
        convert(torch.ones(2), "mxfp8")
    with pytest.raises(RecipeError, match="a recipe is a name, a TOML file, a dict or a Recipe, not 5"):
        convert(model, 5)
    with pytest.raises(NybbleError, match="seed of a rounding key must be in"):
        convert(model, "mxfp8", seed=-1)


def test_experts_of_another_layout_are_refused_by_name():
    class Transposed(nn.Module):
        is_transposed = True

        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 32, 64))
            self.down_proj = nn.Parameter(torch.zeros(2, 32, 32))
            self.act_fn = nn.SiLU()

    model = nn.ModuleDict({"experts": Transposed()})
    with pytest.raises(RecipeError, match=r"experts \(Transposed\) stores its weights as \[E, in, out\]"):
        convert(model, {"rule": [{"modules": "**", "all": "mxfp8"}]})
    convert(model, "bf16")
    assert type(model["experts"]) is Transposed


def test_gradient_checkpointing_of_the_model_gives_the_same_bits(make_model):
    model = make_model("qwen3-moe")
    convert(model, "inkling")
    plain = train_step(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = train_step(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
