"""On a GPU too, the sampler's log-probabilities are those that the trainer computes again, bit for bit."""

import pytest
import torch
from rl_cases import PARAMS, STOP, policy_model, requests, rollout

from nybble.rl.batching import micro_batches
from nybble.rl.forward import score
from nybble.rl.sampler import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recipe", ["inkling", "bf16"])
def test_a_trainers_logprobs_equal_the_samplers_bit_for_bit_on_a_gpu(recipe: str) -> None:
    model = policy_model(recipe, "cuda")
    asked = requests(72)
    done = sample(model, asked, PARAMS, STOP, invariant=True, prefill_chunk=7)
    rollouts = [rollout(r, c) for r, c in zip(asked, done, strict=True)]
    alone = sample(model, asked[3:4], PARAMS, STOP, invariant=True)
    assert alone[0] == done[3]
    tokens = 0
    for batch in micro_batches(rollouts, 400, pad=0, multiple=128):
        batch = batch.to(torch.device("cuda"))
        scores = score(model, batch, invariant=True)
        scores.logprobs.sum().backward()
        assert torch.equal(scores.logprobs, batch.sampled)
        known = batch.experts >= 0
        assert torch.equal(scores.experts[known], batch.experts[known])
        tokens += len(batch.targets)
    assert tokens >= 1000
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
