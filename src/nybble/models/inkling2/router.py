"""Sigmoid router: the k experts of a token by biased score, their weights by unbiased score."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Inkling2TextConfig


class Router(nn.Module):
    """hidden [T, H] -> logits [T, E], weights [T, k] (FP32), experts [T, k] (int64).

    Runs in FP32. `e_score_correction_bias` [E] shifts which experts are chosen, not how they are weighed;
    the trainer moves it to balance load (arXiv 2408.15664).
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: Inkling2TextConfig) -> None:
        super().__init__()
        self.top_k, self.gain = config.num_experts_per_tok, config.route_scale
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.float(), self.weight.float())
        scores = torch.sigmoid(logits)
        experts = torch.topk(
            scores + self.e_score_correction_bias.float(), self.top_k, dim=-1, sorted=False
        ).indices
        return logits, self.weigh(scores, experts), experts

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Weights [T, k] of chosen experts [T, k] from all scores [T, E]."""
        weights = scores.gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.gain
