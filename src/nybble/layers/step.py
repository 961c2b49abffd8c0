"""Where a run stands: the seed, step and micro-batch that name every random draw, shared by the layers of a
model."""

from typing import Any

import torch
from torch import Tensor, nn

from nybble.formats.philox import check_range
from nybble.layers.shared import LastOperand


class StepState:
    """Seed, step and micro-batch as int64 tensors, so that compiled and captured graphs follow when they
    change; and which part of the batch this process has.

    A pass keeps the tensors that it began with, also where the next `set_step` comes before its backward
    pass. Those of CUDA graphs alone are updated in place: a graph reads the same memory each time. Draws of
    weights always use micro-batch 0: their codes serve all micro-batches of a step.
    """

    def __init__(self, seed: int = 0) -> None:
        check_range("seed", seed)
        self.seed, self.step, self.micro = seed, 0, 0
        self.part = 0
        """Which of equal consecutive parts of the batch's tokens the layers see: 0 unless ranks share one."""
        self.generation = 0
        """Counts calls that may follow a change of the weights: cached operands of an older one are not
        used."""
        self.managed = False
        """True once `set_step` was called: only then do layers cache weight operands between forward
        passes."""
        self.fresh = False
        """True between `refresh` and the next step: compiled graphs may use cached weight operands."""
        self.inputs, self.kept_inputs = LastOperand(), LastOperand()
        """What linear layers made last of an input, for fprop and for wgrad."""
        self._keys: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._captured: set[torch.device] = set()
        """Where a CUDA graph reads the keys."""

    def keys(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(key of activations, key of weights) on `device`, int64 [4] each: seed, step, micro, 0."""
        if device not in self._keys:
            self._keys[device] = (
                _made(self.seed, self.step, self.micro, 0, device=device),
                _made(self.seed, self.step, 0, 0, device=device),
            )
        key, weight_key = self._keys[device]
        if _capturing(device):
            self._captured.add(device)
        elif device in self._captured:
            return key.clone(), weight_key.clone()
        return key, weight_key

    def rows(self, tokens: int, device: torch.device) -> Tensor | None:
        """int64 [tokens]: what this part's tokens count as in draws; None where that is their index."""
        if self.part == 0:
            return None
        return torch.arange(self.part * tokens, (self.part + 1) * tokens, device=device)

    def set(self, step: int, micro: int = 0, seed: int | None = None) -> None:
        """Move to `micro` of `step`. Micro-batch 0 begins a step: the weights may have changed."""
        seed = self.seed if seed is None else seed
        for field, value in (("seed", seed), ("step", step), ("micro", micro)):
            check_range(field, value)
        if micro == 0 or (seed, step) != (self.seed, self.step):
            self.generation += 1
            self.fresh = False
        self.inputs.clear()
        self.kept_inputs.clear()
        before = (self.seed, self.step, self.micro)
        self.seed, self.step, self.micro = seed, step, micro
        self.managed = True
        changed = {i: new for i, new in enumerate((seed, step, micro)) if new != before[i]}
        of_weights = {i: new for i, new in changed.items() if i < 2}
        for device, (key, weight_key) in self._keys.items():
            in_place = device in self._captured
            self._keys[device] = _changed(key, changed, in_place), _changed(weight_key, of_weights, in_place)

    def __deepcopy__(self, memo: dict[int, object]) -> "StepState":
        copy = StepState(self.seed)
        memo[id(self)] = copy
        copy.step, copy.micro, copy.managed, copy.part = self.step, self.micro, self.managed, self.part
        return copy


def _capturing(device: torch.device) -> bool:
    plain = device.type == "cuda" and not torch.compiler.is_compiling()
    return plain and torch.cuda.is_current_stream_capturing()


@torch.inference_mode(False)  # a training pass may keep what was made here during a sampler's
def _made(*entries: int, device: torch.device) -> Tensor:
    return torch.tensor(entries, dtype=torch.int64, device=device)


@torch.inference_mode(False)
def _changed(key: Tensor, entries: dict[int, int], in_place: bool) -> Tensor:
    """The key with other entries."""
    if entries and not in_place:
        key = key.clone()
    for i, new in entries.items():
        key[i].fill_(new)  # waits for nothing; a copy from the host's memory would wait for the GPU
    return key


def set_step(model: nn.Module, step: int, micro: int = 0, seed: int | None = None) -> None:
    """Tell the converted layers of `model` which optimiser step and micro-batch come next.

    Call it before each forward pass: draws then differ between steps, and quantised weights are computed once
    a step.
    """
    states: dict[StepState, set[torch.device]] = {}
    for module in model.modules():
        state = module.__dict__.get("step_state")  # faster than asking a module that has none
        if isinstance(state, StepState):
            if phases := getattr(module, "phases", ()):
                _enter(module, next(gemms for start, gemms in reversed(phases) if start <= step))
            states.setdefault(state, set()).update(p.device for p in module.parameters(recurse=False))
    for state, devices in states.items():
        state.set(step, micro, seed)
        for device in devices:
            # A compiled forward pass must find its key: one made inside a graph would be a constant of it.
            state.keys(device)


def _enter(module: nn.Module, gemms: Any) -> None:
    """Give a layer the precision of a phase of its recipe; operands kept before have another step's tag."""
    layer: Any = module
    if hasattr(layer, "specs"):
        layer.specs = tuple(spec._replace(gemms=gemms) for spec in layer.specs)
        if layer.exchange is not None:
            layer.specs = layer.exchange.specs(*layer.specs)
    else:
        layer.spec = layer.spec._replace(gemms=gemms)
