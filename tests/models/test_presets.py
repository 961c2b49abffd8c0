"""Presets: sizes, blocks and training settings."""

import pytest
import torch

from nybble.errors import NybbleError
from nybble.models import Inkling2ForCausalLM, preset, presets

INKLINGS = ["nano", "tiny", "mini", "small", "inkling-2-small"]


def _sizes(name: str) -> tuple[int, int]:
    """All parameters, and those that a token is multiplied with: not the embedding."""
    config = presets.get(name).model_config()
    model = presets.get(name).meta_model()
    count = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    embedding = config.vocab_size * config.hidden_size
    active = experts * config.num_experts_per_tok // config.n_routed_experts
    return count, count - embedding - experts + active


def test_sizes_are_as_described() -> None:
    inklings, hybrids = INKLINGS, ["hybrid-tiny", "hybrid-small", "nemotron-nano-12b-v2"]
    assert presets.names() == [*inklings, *hybrids]
    assert 5e6 < _sizes("tiny")[0] < 20e6
    assert 40e6 < _sizes("mini")[0] < 70e6
    count, active = _sizes("small")
    assert 280e6 < count < 340e6
    assert 50e6 < active < 70e6
    assert 5e6 < _sizes("hybrid-tiny")[0] < 20e6
    assert 80e6 < _sizes("hybrid-small")[0] < 100e6


def test_a_model_larger_than_the_memory_is_refused_before_it_fills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nano = presets.get("nano")
    size = 4 * sum(p.numel() for p in nano.meta_model().parameters())
    monkeypatch.setattr(preset, "memory_bytes", lambda: size)
    nano.model()
    monkeypatch.setattr(preset, "memory_bytes", lambda: 0)
    nano.model()
    monkeypatch.setattr(preset, "memory_bytes", lambda: 24 << 30)
    sentence = (
        "inkling-2-small has 593.7 billion weights, 2212 GiB; this machine has 24 GiB of memory: choose"
    )
    with pytest.raises(NybbleError, match=sentence):
        presets.get("inkling-2-small").model()
    with torch.device("meta"):
        assert presets.get("inkling-2-small").model().device.type == "meta"


@pytest.mark.parametrize("name", presets.names())
def test_shapes_suit_every_format(name: str) -> None:
    chosen = presets.get(name)
    config, model = chosen.model_config(), chosen.meta_model()
    whole = (".experts.",) if name in INKLINGS else ("_proj.weight",)
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in whole):
            assert parameter.shape[-1] % 32 == 0, parameter_name
            assert parameter.shape[-2] % 32 == 0, parameter_name
    assert chosen.vocabulary == model.vocabulary
    assert chosen.sequence <= config.max_position_embeddings
    assert chosen.batch > 0
    assert chosen.steps > 0
    assert 0 < chosen.learning_rate < 0.1


@pytest.mark.parametrize("name", INKLINGS)
def test_layers_are_in_whole_sixths(name: str) -> None:
    config = presets.get(name).model_config()
    assert config.num_hidden_layers % 6 == 0, "the last sixth must be whole layers"
    assert config.layer_types[5::6] == ["hybrid"] * (config.num_hidden_layers // 6)


def test_fields_can_be_changed_and_unknown_names_list_the_known() -> None:
    assert presets.get("tiny").model_config(vocab_size=8192).vocab_size == 8192
    with pytest.raises(
        NybbleError, match="unknown preset 'huge'; the presets are nano, tiny, mini, small, inkling-2-small, "
    ):
        presets.get("huge")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"num_experts_per_tok": 99}, "between 1 and n_routed_experts = 8"),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads = 5"),
        ({"layer_types": ["hybrid"]}, "must be equal to the number of `layer_types`"),
        ({"layer_types": ["full_attention"] * 6}, "may only hold"),
        ({"unpadded_vocab_size": 5000}, "unpadded_vocab_size"),
        ({"conv_kernel_size": 0}, "conv_kernel_size"),
    ],
)
def test_impossible_configurations_name_the_field(changes: dict, message: str) -> None:
    with pytest.raises(NybbleError, match=message):
        Inkling2ForCausalLM(presets.get("tiny").model_config(**changes))


def test_labels_and_ids_out_of_the_vocabulary_are_named() -> None:
    model = Inkling2ForCausalLM(presets.get("tiny").model_config(unpadded_vocab_size=4000))
    ids = torch.tensor([[1, 4050, 3]])
    with pytest.raises(NybbleError, match="labels holds token 4050, but the model's vocabulary has 4000"):
        model(ids, labels=ids)
    with pytest.raises(NybbleError, match="input_ids holds token -1"):
        model(torch.tensor([[1, -1]]))
