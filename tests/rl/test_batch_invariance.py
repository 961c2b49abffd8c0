"""The sampler's log-probabilities are those that the trainer computes again, bit for bit."""

import numpy as np
import pytest
import torch
from inkling2_cases import random_model

from nybble import convert
from nybble.layers import set_step
from nybble.models import Inkling2ForCausalLM
from nybble.models.cpu import exact
from nybble.models.invariant import batch_invariant
from nybble.rl.batching import micro_batches
from nybble.rl.forward import score
from nybble.rl.rollout import Rollout
from nybble.rl.sampler import Completion, Request, SamplingParams, sample

SIZES = {"hidden_size": 64, "head_dim": 16, "swa_head_dim": 16, "log_scaling_n_floor": 8}
LENGTHS = (3, 1, 9, 17, 5, 30, 2, 12)


def policy(recipe: str) -> Inkling2ForCausalLM:
    model = random_model(**SIZES)
    convert(model, recipe)
    set_step(model, 0)
    return model


def requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            prompt=tuple(torch.randint(0, 100, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()),
            problem=i // 4,
            sample=i % 4,
        )
        for i in range(count)
    ]


def rollout(request: Request, completion: Completion) -> Rollout:
    return Rollout(
        step=0, problem=request.problem, sample=request.sample, prompt="", prompt_tokens=request.prompt,
        text="", tokens=completion.tokens, logprobs=completion.logprobs, finish=completion.finish,
        reward=0.0, experts=completion.experts,
    )  # fmt: skip


PARAMS = SamplingParams(max_new_tokens=24, seed=3)
STOP = frozenset({1, 7, 20})


@pytest.mark.parametrize("recipe", ["inkling", "bf16"])
def test_a_trainers_logprobs_equal_the_samplers_bit_for_bit(recipe: str) -> None:
    model = policy(recipe)
    asked = requests(72)
    done = sample(model, asked, PARAMS, STOP, invariant=True, prefill_chunk=7)
    assert len({len(c.tokens) for c in done}) > 5, "ragged"
    rollouts = [rollout(r, c) for r, c in zip(asked, done, strict=True)]
    tokens = 0
    for batch in micro_batches(rollouts, 400, pad=0):
        scores = score(model, batch, invariant=True)  # with gradients, as in training
        assert torch.equal(scores.logprobs, batch.sampled)
        known = batch.experts >= 0
        assert torch.equal(scores.experts[known], batch.experts[known])
        tokens += len(batch.targets)
    assert tokens >= 1000
