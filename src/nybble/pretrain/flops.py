"""How many operations a token of training takes: what a model's MFU is counted from."""

from __future__ import annotations

import torch
from torch import nn

from nybble.recipes import kind_of

BF16_PEAKS = {
    (9, 0): ("H100, H200", 989e12),
    (10, 0): ("B200", 2250e12),
    (10, 3): ("B300", 2500e12),
    (8, 0): ("A100", 312e12),
}
"""Dense BF16 operations a second by compute capability, as the vendor's data sheets give them."""


def model_flops(model: nn.Module, sequence: int) -> float:
    """Operations of the forward and backward pass of one token: 6 a parameter of its products, and attention.

    Routed experts count as the k that a token goes through. Attention counts 12 H D a key that a query sees,
    half of the sequence where it is causal and whole, the window where it is sliding (PaLM, arXiv 2204.02311,
    appendix B, with the mask counted).
    """
    config = getattr(model, "config", None)
    k = getattr(config, "num_experts_per_tok", 1)
    total = 0.0
    for module in model.modules():
        if kind_of(module) == "experts":
            weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
            total += sum(6.0 * p.numel() / p.shape[0] * k for p in weights)
        elif isinstance(module, nn.Linear):
            total += 6.0 * module.weight.numel()
        window, projection = getattr(module, "window", 0), getattr(module, "q_proj", None)
        if projection is not None and window != 0:
            keys = sequence / 2 if window is None else min(window, sequence / 2)
            width = getattr(projection, "linear", projection).out_features
            total += 12.0 * width * keys
    return total


def bf16_peak(device: torch.device) -> float | None:
    """Dense BF16 operations a second of a GPU that is known; None for others."""
    if device.type != "cuda":
        return None
    known = BF16_PEAKS.get(torch.cuda.get_device_capability(device))
    return None if known is None else known[1]
