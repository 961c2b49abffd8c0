"""Which experts a model's tokens went to: noted as it runs, and given back to it in a replay.

Legend: L layers, T tokens of a forward pass (batch x sequence, row by row), k experts a token.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nybble.models.balance import ExpertLoad

Experts = NDArray[np.uint16]
"""[tokens, L, k]."""


class RoutingNote:
    """The experts of the last forward pass: int64 [T, k] a layer."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def stacked(self) -> Tensor:
        """[T, L, k]."""
        return torch.stack([self.layers[i] for i in sorted(self.layers)], dim=1)


@contextmanager
def note_routing(model: nn.Module) -> Iterator[RoutingNote | None]:
    """While it is open, each forward pass leaves its experts in the note; None if the model routes not."""
    if not isinstance(model, ExpertLoad) or not model.expert_load.numel():
        yield None
        return
    note = RoutingNote()

    def hook(layer: int) -> Any:
        def on_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            note.layers[layer] = output[2].detach()

        return on_output

    handles = [router.register_forward_hook(hook(i)) for i, router in enumerate(model.routers())]
    try:
        yield note
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(model: nn.Module, experts: Tensor | None) -> Iterator[None]:
    """While it is open, tokens go to `experts` [T, L, k] whatever the routers choose; -1 leaves the choice.

    The weights of the experts are still the router's own, so that it goes on learning (router replay). None
    changes nothing.
    """
    if experts is None or not isinstance(model, ExpertLoad):
        yield
        return
    given = experts

    def hook(layer: int) -> Any:
        def on_output(module: nn.Module, _inputs: Any, output: Any) -> Any:
            logits, _, own = output
            wanted = given[:, layer].to(own)
            chosen = torch.where(wanted >= 0, wanted, own)
            router: Any = module
            return logits, router.weigh(logits, chosen), chosen

        return on_output

    handles = [router.register_forward_hook(hook(i)) for i, router in enumerate(model.routers())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pack(experts: Experts | None) -> dict[str, Any] | None:
    """As JSON: the shape, and the little-endian 16-bit numbers in base64."""
    if experts is None:
        return None
    raw = np.ascontiguousarray(experts, dtype="<u2").tobytes()
    return {"shape": list(experts.shape), "uint16": base64.b64encode(raw).decode("ascii")}


def unpack(value: dict[str, Any] | None) -> Experts | None:
    """The reverse of `pack`."""
    if value is None:
        return None
    raw = np.frombuffer(base64.b64decode(value["uint16"]), dtype="<u2")
    return raw.reshape(value["shape"]).astype(np.uint16)
