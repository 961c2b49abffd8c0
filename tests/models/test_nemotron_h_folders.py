"""Folders go both ways between this model and transformers', compiled graphs, and the meta device."""

from pathlib import Path

import pytest
import torch
from nemotron_h_cases import random_ids, random_model, randomise, small_config
from safetensors import safe_open
from transformers import GenerationConfig
from transformers import NemotronHForCausalLM as Published

from nybble.errors import NybbleError
from nybble.layers import convert
from nybble.models import NemotronHForCausalLM, presets
from nybble.models.nemotron_h import kernels


@pytest.mark.parametrize("shards", ["5GB", "40KB"])
def test_folders_go_both_ways(tmp_path: Path, shards: str) -> None:
    published = Published(small_config())
    randomise(published)
    published.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    ours = NemotronHForCausalLM.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours", max_shard_size=shards)
    back = Published.from_pretrained(tmp_path / "ours")
    for name, tensor in published.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
        assert torch.equal(back.state_dict()[name], tensor), name
    indexes = [sorted(p.name for p in (tmp_path / who).iterdir()) for who in ("theirs", "ours")]
    assert indexes[0] == indexes[1]
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == 1


def test_folders_hold_the_names_of_the_hub(tmp_path: Path) -> None:
    NemotronHForCausalLM(small_config()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "backbone.layers.0.mixer.A_log" in names
    assert "backbone.layers.4.mixer.experts.3.up_proj.weight" in names
    assert not any(name.startswith("model.") for name in names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_compile_without_a_graph_break() -> None:
    changes = {"hybrid_override_pattern": "M*"}
    plain, compiled = random_model(**changes).train(), random_model(**changes).train()
    compiled.load_state_dict(plain.state_dict())
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    ids = random_ids(2, 40)
    segments = (torch.arange(40) // 17).expand(2, 40)
    expected, got = (m(ids, labels=ids, segments=segments).loss for m in (plain, compiled))
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 2e-4 * (p.grad.norm() + 1e-3), name
    torch.compiler.reset()


def test_the_real_shape_has_12_billion_parameters() -> None:
    model = presets.get("nemotron-nano-12b-v2").meta_model()
    assert round(sum(p.numel() for p in model.parameters()) / 1e8) == 123
    report = convert(model, "fp8")
    linears = [row for row in report.resolved.rows if not row.protected]
    # 28 Mamba-2 layers and 28 MLPs of two linears each, 6 attention layers of four
    assert len(linears) == 28 * 2 + 28 * 2 + 6 * 4
    # what has no linear layer stays as it is
    kept = set(report.resolved.kept)
    for name in ("embeddings", "norm_f", "layers.0.norm", "layers.0.mixer", "layers.0.mixer.conv1d"):
        assert f"model.{name}" in kept, name
    assert {name for name, _ in model.model.layers[0].mixer.named_parameters(recurse=False)} == {
        "A_log",
        "D",
        "dt_bias",
    }


@pytest.mark.parametrize("recipe", ["inkling", "mxfp8", "fp8"])
def test_converted_models_train_with_router_and_recurrence_untouched(recipe: str) -> None:
    sizes = {"n_groups": 4, "mamba_num_heads": 32, "mamba_head_dim": 4, "intermediate_size": 64}
    sizes |= {
        "hybrid_override_pattern": "M-M*EE",
        "num_attention_heads": 4,
        "head_dim": 16,
        "moe_shared_expert_intermediate_size": 32,
    }
    model = NemotronHForCausalLM(small_config(hidden_size=64, ssm_state_size=32, **sizes)).train()
    report = convert(model, recipe)
    assert "model.layers.4.mixer.gate" in report.resolved.kept
    ids = random_ids(2, 32)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_choice_of_kernels_names_its_reason() -> None:
    assert "they are for CUDA, and the model is on cpu" in random_model().status()
    cuda = torch.device("cuda")
    found = kernels._functions()
    if isinstance(found, str):
        assert kernels.cannot_run(cuda, 4) == found
        assert "is not installed" in found
    else:
        assert kernels.cannot_run(cuda, 4) is None
        assert "2 to 4 taps" in str(kernels.cannot_run(cuda, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu' is not supported"),
        ({"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_groups": 3}, "multiple of n_groups = 3"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must lie between 1 and 4"),
        ({"n_group": 4}, "leaves fewer than 2 of 4 experts a group"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_impossible_configurations_name_the_field(changes: dict, message: str) -> None:
    with pytest.raises(NybbleError, match=message):
        NemotronHForCausalLM(small_config(**changes))


def test_unknown_letters_in_the_pattern_are_refused() -> None:
    with pytest.raises(NybbleError, match="hybrid_override_pattern has a layer 'X'; M is Mamba-2"):
        presets.get("hybrid-tiny").model_config(hybrid_override_pattern="MX")
