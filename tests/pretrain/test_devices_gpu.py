"""A hundred steps of `tiny` on a GPU and on a CPU from one seed: the same operands, and the same losses but
for the order of FP32 additions and for activations, which a GPU rounds to BF16 between products."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nybble.layers import convert, set_step
from nybble.models import Inkling2ForCausalLM, presets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, BATCH, LENGTH, VOCABULARY = 100, 4, 256, 4096
SPECIFIED = ("quantize", "fake_quantize", "requantize", "fake_requantize", "dequantize", "hadamard")


class Calls(TorchDispatchMode):
    """The quantisers' calls in a pass, with what went in and what came out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space == "nybble" and name in SPECIFIED:
            outputs = out if isinstance(out, tuple) else (out,)
            self.seen.append((func, *copied((args, kwargs or {}, outputs), "cpu")))
        return out


def copied(tree: Any, device: str) -> Any:
    """`tree` with copies of its tensors on `device`."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone().to(device), tree)


def made() -> Inkling2ForCausalLM:
    torch.manual_seed(0)
    model = Inkling2ForCausalLM(presets.get("tiny").model_config()).train()
    convert(model, "inkling")
    return model


def batches() -> list[Tensor]:
    """Text of a Markov chain whose words have 8 successors each: 2.1 nats a token are left to learn."""
    gen = torch.Generator().manual_seed(1)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 8), generator=gen)
    word = torch.randint(VOCABULARY, (STEPS * BATCH,), generator=gen)
    words = [word]
    for _ in range(LENGTH - 1):
        choice = torch.randint(8, word.shape, generator=gen)
        word = successors[word, choice]
        words.append(word)
    return list(torch.stack(words, 1).split(BATCH))


def train(device: str) -> tuple[Tensor, Calls]:
    """Losses of all steps, and the quantisers' calls in the first."""
    model = made().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, calls = [], Calls()
    for step, ids in enumerate(batches()):
        set_step(model, step, 0)
        ids = ids.to(device)
        if step == 0:
            with calls:
                loss = model(ids, labels=ids).loss
                loss.backward()
        else:
            loss = model(ids, labels=ids).loss
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses).cpu(), calls


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def test_a_hundred_steps_on_a_gpu_are_those_of_a_cpu():
    """Operands of step 1 byte for byte, given what goes into them; losses to noise: 1024 tokens average the
    roundings of BF16, 2^-9 each, to some 2^-14 of the first loss.
    """
    cpu, calls = train("cpu")
    assert len(calls.seen) > 20
    for func, args, kwargs, outputs in calls.seen:
        out = func(*copied(args, "cuda"), **copied(kwargs, "cuda"))
        for want, got in zip(outputs, out if isinstance(out, tuple) else (out,), strict=True):
            assert same(got.cpu(), want), func
    gpu, on_gpu = train("cuda")
    for func, args, kwargs, outputs in on_gpu.seen:
        out = func(*copied(args, "cpu"), **copied(kwargs, "cpu"))
        for got, want in zip(outputs, out if isinstance(out, tuple) else (out,), strict=True):
            assert same(got, want), func
    gap = (gpu - cpu).abs() / cpu
    print(f"step 1: {len(calls.seen)} and {len(on_gpu.seen)} calls; losses {cpu[0]:.4f} to {cpu[-1]:.4f}")
    print(f"relative gap: step 1 {gap[0]:.2e}, largest {gap.max():.2e}, mean {gap.mean():.2e}")
    assert gap[0] < 2e-4
    assert gap.max() < 1e-2
    assert cpu[-1] < cpu[0] - 1
