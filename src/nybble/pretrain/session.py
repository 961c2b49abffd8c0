"""A run in progress: its model, optimiser, data and files, and how all of it is saved and restored."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nybble import checkpoints, together
from nybble.checkpoints.identity import check_identity
from nybble.checkpoints.tensors import load_tensors, tensor_shapes
from nybble.errors import CheckpointError
from nybble.layers.experts import local
from nybble.layers.refresh import refresh
from nybble.layers.step import set_step
from nybble.parallel import Monitor
from nybble.parallel.gradients import add_over_ranks
from nybble.pretrain import metrics
from nybble.pretrain.balance import LoadBalance
from nybble.pretrain.captured import Captured
from nybble.pretrain.config import PretrainConfig
from nybble.pretrain.flops import bf16_peak, model_flops
from nybble.pretrain.metrics import MetricsFile
from nybble.pretrain.optimiser import Optimiser
from nybble.pretrain.runfolder import RunFolder
from nybble.pretrain.sinks import Sink


class Batches(Protocol):
    """An endless source of batches with a position that can be saved; `nybble.data.Loader` is one.

    Batches are dicts of int64 [B, S]: `input_ids`, and `labels`, already shifted by one; -100 is no target.
    """

    def __next__(self) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


HeldOut = Callable[[], Iterable[dict[str, Tensor]]]
"""Gives the same held-out batches at each call."""


class Session:
    """All parts of a run. The loop drives it; tests build it from small parts of their own."""

    def __init__(
        self,
        *,
        config: PretrainConfig,
        run: RunFolder,
        model: nn.Module,
        train_data: Batches,
        held_out_data: HeldOut | Mapping[str, HeldOut],
        identity: dict[str, Any],
        export: Callable[[nn.Module, Path], None] | None = None,
        device: torch.device | None = None,
        monitor: Monitor | None = None,
        copies: bool = False,
    ) -> None:
        """`held_out_data` may be given by domain. `identity` is what a checkpoint must share to be resumed;
        `export` adds a transformers folder to it; `monitor` is what the exchanges of several ranks report to,
        and `copies` says that each of them has the whole model.
        """
        self.config, self.run, self.model = config, run, model
        self.device = device or torch.device("cpu")
        self.balance = LoadBalance(model, config.optimiser.bias_update)
        self.optimiser = Optimiser(model, config.optimiser)
        self.captured = Captured(model, self.loss, self.set_step) if config.graph else None
        self.flops_per_token = model_flops(model, config.batch.sequence)
        self.peak_flops = bf16_peak(self.device)
        self.sinks: list[Sink] = []
        self.step = 0
        self.first_step = 0
        self.elapsed_s = 0.0
        self._train_data = train_data
        self._held_out_data = held_out_data
        self._identity = identity
        self._export = export
        self._metrics: MetricsFile | None = None
        self.monitor = monitor or Monitor()
        self.copies = copies

    @property
    def metrics(self) -> MetricsFile:
        """Opened at the first use, when it is known from which step the run goes on."""
        if self._metrics is None:
            self._metrics = MetricsFile(self.run.metrics, keep_steps=self.first_step)
        return self._metrics

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        if self._metrics is not None:
            self._metrics.close()
        self.run.close()

    # One step

    def next_batch(self) -> dict[str, Tensor]:
        return self._to_device(next(self._train_data))

    def held_out(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(domain, batch) of held-out text, the same ones at each call; "" is the domain of data with one."""
        data = self._held_out_data
        domains = data if isinstance(data, Mapping) else {"": data}
        for name, batches in domains.items():
            for batch in batches():
                yield name, self._to_device(batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the batch, nats a token, []."""
        return self.model(
            batch["input_ids"], shift_labels=batch["labels"], segments=batch.get("doc_ids")
        ).loss

    def set_step(self, step: int, micro: int) -> None:
        """Tells the stochastic rounding where the run is."""
        set_step(self.model, step, micro, seed=self.config.seed)
        self.monitor.watch.begin(step + 1)
        if micro == 0 and self.config.compile and (self.copies or not together.active()):
            # A compiled forward pass cannot see that weights have changed, and would quantise them each time.
            refresh(self.model)

    def add_gradients(self) -> None:
        """Sums gradients over ranks that have copies of the model; in other models that is done by then."""
        if self.copies:
            with self.monitor.watch.waiting("gradients", self.device):
                add_over_ranks(p.grad for p in self.model.parameters() if p.grad is not None)

    def exchanged(self) -> dict[str, Any]:
        """Entries of a row on the exchanges since the last one; none for a run of one process."""
        if not together.active():
            return {}
        counted, waited = self.monitor.meter.take()
        sums = together.total([*counted.values(), *waited.values()], self.device)
        tokens = self.config.batch.tokens_per_step
        by_leg = [
            dict(zip(counted, part, strict=True)) for part in (sums[: len(counted)], sums[len(counted) :])
        ]
        return metrics.exchanged(by_leg[0], by_leg[1], tokens, together.world())

    def peak_memory(self) -> int:
        """Most bytes used so far: of the GPU, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    # Save and restore

    def save(self) -> Path:
        """Writes a checkpoint and deletes those beyond `keep`. Raises CheckpointError if the disk is full."""
        if together.is_main():
            self.metrics.sync()
        tensors = self._model_tensors() | {f"optimiser/{k}": v for k, v in self.optimiser.state().items()}
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"data": self._train_data.state_dict(), "elapsed_s": self.elapsed_s}
        export = None if self._export is None else partial(self._export, self.model)
        path = checkpoints.write(self.run.checkpoints, self.step, tensors, state, self._identity, export)
        together.on_main(lambda: checkpoints.prune(self.run.checkpoints, self.config.checkpoint.keep))
        return path

    def restore(self) -> Path | None:
        """Goes back to the newest checkpoint of the run, if it has one.

        Raises CheckpointError if it is corrupt, or belongs to another model, recipe or data.
        """
        saved = together.on_main(self._newest)
        if saved is None:
            return None
        path = saved.path
        check_identity(saved.identity, self._identity, path)
        if saved.step > self.config.schedule.steps:
            raise CheckpointError(
                f"{path} is at step {saved.step}, beyond the {self.config.schedule.steps} steps asked for"
            )
        shapes = tensor_shapes(saved.tensors)
        prefix = "optimiser/"
        moments = {k.removeprefix(prefix): v for k, v in shapes.items() if k.startswith(prefix)}
        tensors = self._model_tensors() | {prefix + k: v for k, v in self.optimiser.allocate(moments).items()}
        generators = {k: torch.empty(shapes[k][0], dtype=torch.uint8) for k in shapes if k.startswith("rng/")}
        load_tensors(saved.tensors, tensors | generators)
        torch.set_rng_state(generators["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in generators:
            torch.cuda.set_rng_state(generators["rng/cuda"], self.device)
        self._train_data.load_state_dict(saved.state["data"])
        self.step = self.first_step = saved.step
        self.elapsed_s = saved.state["elapsed_s"]
        return path

    def _newest(self) -> checkpoints.Checkpoint | None:
        checkpoints.sweep(self.run.checkpoints)
        path = checkpoints.latest(self.run.checkpoints)
        return None if path is None else checkpoints.read(path)

    def last_checkpoint(self) -> str:
        path = checkpoints.latest(self.run.checkpoints)
        return f"the last checkpoint is {path}" if path else "no checkpoint was saved yet"

    def _model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, tied ones once."""
        seen: set[int] = set()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            address = local(tensor).data_ptr()
            if address not in seen or local(tensor).numel() == 0:
                seen.add(address)
                tensors[f"model/{name}"] = tensor
        return tensors

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
