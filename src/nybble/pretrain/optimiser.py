"""AdamW, or Muon for the 2-D matrices with AdamW for the rest; the state is a flat dict of named tensors.

Parameters are the FP32 masters. Muon is that of Jordan et al. 2024 in torch.optim, with the update scaled
to the RMS of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate and one weight decay
serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nybble.errors import CheckpointError
from nybble.parallel.gradients import by_mesh, clip, total_norm
from nybble.pretrain.config import OptimiserConfig
from nybble.pretrain.muon import Muon


class Optimiser:
    """One or two torch optimisers that step together under one schedule."""

    def __init__(self, model: nn.Module, config: OptimiserConfig) -> None:
        self.peak_lr = config.lr
        self.clip = config.clip
        self.lr = 0.0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self.named.items()}
        self.parts = _build(model, self.named, config)

    def set_factor(self, factor: float) -> None:
        """Sets the rate to `factor` times the peak."""
        self.lr = self.peak_lr * factor
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.lr

    def clip_gradients(self) -> Tensor:
        """Scales the gradients to a global norm of at most `clip`; returns the norm before, FP32, []."""
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        norm = total_norm(gradients)
        if self.clip > 0:
            clip(self.named.values(), self.clip, norm)
        return norm

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as `parameter/key`; they alias the live state."""
        return {
            f"{self._names[id(p)]}/{key}": value
            for part in self.parts
            for p, entries in part.state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }

    def allocate(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Replaces the state by uninitialised tensors of the given shapes, to be filled from a checkpoint.

        Raises CheckpointError if a name belongs to no parameter of this optimiser, or a parameter has no
        state.
        """
        owner = {id(p): part for part in self.parts for group in part.param_groups for p in group["params"]}
        fused = {id(part): bool(part.defaults.get("fused")) for part in self.parts}
        for part in self.parts:
            part.state.clear()
        for name, (size, dtype) in shapes.items():
            parameter_name, _, key = name.rpartition("/")
            if parameter_name not in self.named:
                raise CheckpointError(
                    f"the checkpoint holds optimiser state of {parameter_name}, which the model lacks"
                )
            p = self.named[parameter_name]
            part = owner[id(p)]
            # A step counter lives on the device only where one kernel updates all parameters.
            on_device = len(size) > 0 or fused[id(part)]
            device = p.device if on_device else torch.device("cpu")
            if size == p.shape:
                tensor = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).detach()
            else:
                tensor = torch.empty(size, dtype=dtype, device=device)
            part.state[p][key] = tensor
        missing = [name for name, p in self.named.items() if shapes and p not in owner[id(p)].state]
        if missing:
            raise CheckpointError(f"the checkpoint holds no optimiser state of {missing[0]}")
        return self.state()


def is_matrix(p: Tensor) -> bool:
    """Whether weight decay applies: to a matrix or a stack of them, not to a vector or a convolution [C, 1,
    k].
    """
    return p.ndim >= 2 and min(p.shape[-2:]) > 1


def _build(
    model: nn.Module, named: dict[str, nn.Parameter], config: OptimiserConfig
) -> list[torch.optim.Optimizer]:
    by_muon = _muon_filter(model) if config.optimiser == "muon" else (lambda _: False)
    parts: list[torch.optim.Optimizer] = []
    muon = [(name, p) for name, p in named.items() if by_muon(p)]
    if muon:
        parts.append(Muon(muon, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum))
    rest = [p for p in named.values() if not by_muon(p)]
    decays = ((lambda p: is_matrix(p), config.weight_decay), (lambda p: not is_matrix(p), 0.0))
    # Parameters that lie on different arrangements of ranks cannot share a fused call.
    groups = [
        {"params": group, "weight_decay": decay}
        for wanted, decay in decays
        for group in by_mesh(p for p in rest if wanted(p))
    ]
    if groups:
        # Fused is one pass over memory on CPUs and GPUs alike, and gives the same bits whatever the
        # tensor's size.
        parts.append(
            torch.optim.AdamW(
                groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
            )
        )
    return parts


def _muon_filter(model: nn.Module) -> Callable[[Tensor], bool]:
    """Muon takes the 2-D matrices that mix features: no embeddings and no head."""
    embeddings = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        embeddings |= {id(p) for p in head.parameters()}
    return lambda p: p.ndim == 2 and is_matrix(p) and id(p) not in embeddings
