"""Experts of plain BF16 on a CPU, computed as a whole, are those computed operand by operand."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.layers import convert, experts
from nybble.models.inkling2.experts import Experts


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Inkling2TextConfig(
            hidden_size=64, moe_intermediate_size=32, n_routed_experts=6, num_hidden_layers=1,
            layer_types=["hybrid"],
        )  # fmt: skip
        self.experts = Experts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_bf16_experts_agree(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(threads)
    model = _Model()
    convert(model, "bf16")
    x, weights, seed = torch.randn(90, 64), torch.rand(90, 2), torch.randn(90, 64)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(90)])  # none goes to the last
    results: list[list[Tensor]] = []
    for by_hand in (True, False):
        if not by_hand:
            monkeypatch.setattr(experts, "by_hand", lambda _: False)
        model.zero_grad()
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = model.experts(leaves[0], index, leaves[1])
        y.backward(seed)
        grads = [t.grad for t in (*leaves, model.experts.gate_up_proj, model.experts.down_proj)]
        results.append([y.detach(), *(g for g in grads if g is not None)])
    for whole, apart in zip(*results, strict=True):
        # FP32 noise tips a few operands over to their neighbour of 8 bits
        assert (whole - apart).norm() <= 2e-3 * apart.norm()
    assert not results[0][3][5].any()
