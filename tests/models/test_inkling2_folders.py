"""Folders go both ways between this model and transformers'."""

import json
from pathlib import Path

import pytest
import torch
from inkling2_cases import random_ids, randomise, small_config
from safetensors import safe_open
from transformers import GenerationConfig
from transformers import Inkling2ForCausalLM as Published

from nybble.models import Inkling2ForCausalLM


@pytest.mark.parametrize("shards", ["5GB", "40KB"])
def test_folders_go_both_ways(tmp_path: Path, shards: str) -> None:
    published = Published(small_config())
    randomise(published)
    published.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    ours = Inkling2ForCausalLM.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours", max_shard_size=shards)
    back = Published.from_pretrained(tmp_path / "ours")
    for name, tensor in published.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
        assert torch.equal(back.state_dict()[name], tensor), name
    ids = random_ids(1, 30)
    torch.testing.assert_close(back(ids).logits, published(ids).logits, atol=0, rtol=0)
    indexes = [sorted(p.name for p in (tmp_path / who).iterdir()) for who in ("theirs", "ours")]
    assert indexes[0] == indexes[1]
    assert ("model.safetensors.index.json" in indexes[1]) == (shards == "40KB")


def test_the_head_is_padded_on_disk_alone(tmp_path: Path) -> None:
    model = Inkling2ForCausalLM(small_config())
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        head = file.get_tensor("model.llm.unembed.weight")
    assert head.shape[0] == 128
    assert torch.equal(head[:100], model.lm_head.weight)
    assert not head[100:].any()


def test_configs_name_the_architecture_and_the_end_of_text(tmp_path: Path) -> None:
    Inkling2ForCausalLM(small_config(eos_token_id=7)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Inkling2ForCausalLM"]
    assert config["model_type"] == "inkling2_text"
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 7


def test_bf16_folders_keep_what_must_stay_fp32(tmp_path: Path) -> None:
    Inkling2ForCausalLM(small_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    ours = Inkling2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = Published.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {n: p.dtype for n, p in ours.state_dict().items()} == {
        n: p.dtype for n, p in theirs.state_dict().items()
    }
    assert ours.model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert torch.equal(ours(random_ids(1, 9)).logits.isfinite().all(), torch.tensor(True))
