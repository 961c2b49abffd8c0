"""Finds the layer where a NaN or an infinity first appears.

A healthy step pays one check of its loss and gradient norm. When that fails, the step is run again, before
the optimiser has touched anything, with hooks on every module: the first output that is not finite in the
forward pass, or else the first gradient that is not finite in the backward pass, names the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nybble import together
from nybble.errors import NonFiniteError
from nybble.layers.experts import local


def check_parameters(model: nn.Module, step: int) -> None:
    """Raises NonFiniteError naming the first parameter that is not finite."""
    for name, p in model.named_parameters():
        if not _finite(p):
            raise NonFiniteError(f"step {step}: the weight {name} holds a NaN or an infinity before the step")


def locate(model: nn.Module, run_step: Callable[[], object], step: int) -> str:
    """Runs `run_step` (forward and backward) once more and says where the first non-finite value came up.

    The gradients it leaves behind are cleared.
    """
    together.all_or_none(lambda: check_parameters(model, step))
    found: list[str] = []
    handles: list[Any] = []

    def note(text: str) -> None:
        if not found:
            found.append(text)

    def on_output(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not tensor.is_floating_point():
                    continue
                if not _finite(tensor):
                    note(f"first seen in the output of {name}")
                elif tensor.requires_grad and not found:
                    tensor.register_hook(
                        on_gradient(f"first seen in the gradient that arrives at the output of {name}")
                    )

        return hook

    def on_gradient(text: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not _finite(gradient):
                note(text)

        return hook

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(on_output(name or type(model).__name__)))
        for name, p in model.named_parameters():
            if p.requires_grad:
                handles.append(
                    p.register_hook(on_gradient(f"first seen in the gradient of the weight {name}"))
                )
        with torch.compiler.set_stance("force_eager"):  # compiled code calls no hook that came after it
            run_step()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    for first in together.gather(found[:1]):
        if first:
            return first[0]
    return "no single layer shows it when the step is run again"


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(local(x.detach())).all())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
