"""Tiny models of the four families, and a way to see what a layer keeps for its backward pass."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _inkling2(top_k: int) -> nn.Module:
    from transformers.models.inkling2 import modeling_inkling2
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

    config = Inkling2TextConfig(
        vocab_size=128, unpadded_vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=16, sliding_window_size=16, rel_extent=16, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=top_k, n_layers_per_attn_res_block=2, eos_token_id=1,
        layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid"],
    )  # fmt: skip
    return modeling_inkling2.Inkling2ForCausalLM(config)


def _our_inkling2(top_k: int) -> nn.Module:
    from nybble.models import Inkling2ForCausalLM

    return Inkling2ForCausalLM(_inkling2(top_k).config)


def _qwen3_moe(top_k: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
            num_experts_per_tok=top_k,
        )
    )  # fmt: skip


def _olmoe(top_k: int) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_experts=4, num_experts_per_tok=top_k, pad_token_id=1, eos_token_id=0,
        )
    )  # fmt: skip


def _llama(top_k: int) -> nn.Module:  # noqa: ARG001  (dense)
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        )
    )  # fmt: skip


FAMILIES = {
    "inkling2": _inkling2,
    "our-inkling2": _our_inkling2,
    "qwen3-moe": _qwen3_moe,
    "olmoe": _olmoe,
    "llama": _llama,
}


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """A tiny random model of a family in training mode."""

    def make(family: str, top_k: int = 2) -> nn.Module:
        torch.manual_seed(1)
        return FAMILIES[family](top_k).train()

    return make


@pytest.fixture
def saved_tensors() -> Callable[[Callable[[], Tensor]], tuple[Tensor, list[Tensor]]]:
    """Run a forward pass and return its output and the tensors that it keeps, each storage once."""

    def run(forward: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            kept.setdefault(t.untyped_storage().data_ptr(), t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = forward()
        return out, list(kept.values())

    return run


@pytest.fixture
def sqnr() -> Callable[[Tensor, Tensor], float]:
    """Signal to noise ratio of `a` against the truth `b`, in decibels."""

    def measure(a: Tensor, b: Tensor) -> float:
        noise = (a.double() - b.double()).pow(2).sum().clamp(min=1e-300)
        return float(10 * torch.log10(b.double().pow(2).sum() / noise))

    return measure


@pytest.fixture
def quantise_calls() -> Callable[[Callable[[], object]], dict[str, int]]:
    """How often each op of the namespace `nybble` runs within a call."""

    def count(call: Callable[[], object]) -> dict[str, int]:
        from torch.utils._python_dispatch import TorchDispatchMode

        counts: dict[str, int] = {}

        class Counter(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "nybble":
                    name = func._schema.name.removeprefix("nybble::")
                    counts[name] = counts.get(name, 0) + 1
                return func(*args, **(kwargs or {}))

        with Counter():
            call()
        return counts

    return count
