"""The passes of a step, and those of a validation, as CUDA graphs: the host launches one a micro-batch.

Everything that changes from step to step lives in tensors that the graphs read: the batch, the key of random
draws, the weights. The first graph of a step quantises the weights and writes the gradients; the second, of
all other micro-batches, takes the quantised weights of the first and adds to the gradients. A graph of its
own has the forward pass alone; it quantises the weights each time, and shares the memory of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nybble import together

Batch = dict[str, Tensor]
WARM_UPS = 3
"""Passes before the first capture: they compile kernels, and allocate what stays."""


class Captured:
    """Passes over batches of one shape, captured at the first call, and again where the recipe changes."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Batch], Tensor],
        set_step: Callable[[int, int], None],
    ) -> None:
        """`loss` gives that of a batch, [], and `set_step(step, micro)` says which one comes next."""
        self.model, self.loss, self.set_step = model, loss, set_step
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.losses: list[Tensor] = []
        self.inputs: Batch = {}
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.held_out: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        changes = (start for module in model.modules() for start, _ in getattr(module, "phases", ()))
        self.changes = sorted({0, *changes})
        self.phase = 0

    def __call__(self, batches: list[Batch], step: int) -> Tensor:
        """Mean loss over the batches, FP32 []; the parameters' gradients are those of this step alone. Of
        several ranks, both are this one's share of the mean over all."""
        if not self.graphs or self._phase(step) != self.phase:
            self._release()
            self._capture(batches, step)
            self.phase = self._phase(step)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        total = torch.zeros_like(self.losses[0], dtype=torch.float32)
        for micro, batch in enumerate(batches):
            self.set_step(step, micro)
            self._take(batch)
            which = min(micro, len(self.graphs) - 1)
            self.graphs[which].replay()
            total += self.losses[which]
        return total

    def evaluate(self, batch: Batch, step: int, micro: int) -> Tensor:
        """Loss of a batch, without gradients, until the next call. Some step must have come before."""
        if self.held_out is None:
            # With gradients enabled, as in a step: nothing is then compiled a second time.
            self.set_step(step, 0)
            graph = torch.cuda.CUDAGraph()
            with torch.enable_grad(), _recording(graph, self.graphs[0].pool()):
                loss = self.loss(self.inputs).detach()
            self.held_out = graph, loss
        graph, loss = self.held_out
        self.set_step(step, micro)
        self._take(batch)
        graph.replay()
        return loss

    def _take(self, batch: Batch) -> None:
        for name, held in self.inputs.items():
            held.copy_(batch[name], non_blocking=True)

    def _phase(self, step: int) -> int:
        return max(i for i, start in enumerate(self.changes) if start <= step)

    def _release(self) -> None:
        self.graphs, self.losses, self.gradients, self.held_out = [], [], [], None

    def _capture(self, batches: list[Batch], step: int) -> None:
        self.inputs = {name: value.clone() for name, value in batches[0].items()}
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._pass(step, 0, len(batches))
        torch.cuda.current_stream().wait_stream(stream)
        restore(self.model, kept)
        for parameter in self.model.parameters():
            parameter.grad = None
        pool: Any = None
        for micro in range(min(len(batches), 2)):
            self.set_step(step, micro)
            graph = torch.cuda.CUDAGraph()
            with _recording(graph, pool):
                self.losses.append(self._run(len(batches)))
            self.graphs.append(graph)
            pool = graph.pool()
        self.gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]

    def _pass(self, step: int, micro: int, count: int) -> None:
        self.set_step(step, micro)
        self._run(count)

    def _run(self, count: int) -> Tensor:
        loss = self.loss(self.inputs) / (count * together.world())
        loss.backward()
        return loss.detach()


def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    """Records `graph`. Of several ranks, a thread of NCCL's may ask the GPU for events meanwhile."""
    mode = "thread_local" if together.active() else "global"
    return torch.cuda.graph(graph, pool=pool, capture_error_mode=mode)


def restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Bring buffers back to what they were: passes that only warm up must leave no trace."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
