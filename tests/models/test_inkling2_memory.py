"""What a training forward keeps, and that recomputation changes nothing."""

import pytest
import torch
from inkling2_cases import random_ids, random_model

from nybble.errors import NybbleError
from nybble.models import Inkling2ForCausalLM


def _kept_bytes(model: Inkling2ForCausalLM, length: int) -> int:
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = random_ids(1, length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids).loss
    assert loss.requires_grad
    return sum(kept.values())


def test_what_attention_keeps_grows_with_the_sequence_not_its_square() -> None:
    model = random_model(max_position_embeddings=2048)
    small, large = _kept_bytes(model, 256), _kept_bytes(model, 1024)
    # Scores of 4 heads alone would be 16 MiB a layer at 1024 tokens, 16 times those at 256.
    assert large < 4.2 * small


def test_checkpointed_layers_keep_less_and_give_the_same_bits() -> None:
    model = random_model().train()
    ids = random_ids(2, 40)
    plain_bytes = _kept_bytes(model, 128)
    model.zero_grad()
    model.reset_expert_counts()
    plain = model(ids, labels=ids).loss
    plain.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    counts = model.expert_counts()
    for layers in (True, [1]):
        model.checkpoint_layers(layers)
        model.zero_grad()
        model.reset_expert_counts()
        again = model(ids, labels=ids).loss
        again.backward()
        assert torch.equal(again, plain)
        assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
        assert torch.equal(model.expert_counts(), counts), "recomputation counts tokens twice"
    model.checkpoint_layers(True)
    assert _kept_bytes(model, 128) < 0.5 * plain_bytes
    with pytest.raises(NybbleError, match="no layer 7"):
        model.checkpoint_layers([7])
