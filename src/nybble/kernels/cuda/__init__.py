"""The ops on NVIDIA GPUs: Triton kernels, imported and compiled when an op first runs on a CUDA tensor."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from nybble.formats import hadamard, reference
from nybble.formats.table import Format
from nybble.kernels import direct, dispatch, expert_swiglu, fused, weight_codes
from nybble.kernels.cuda import launch_both


def _can_run(fmt: Format) -> str | None:
    if fmt.passthrough:
        return f"{fmt.name} is a cast, which torch does"
    if fmt.four_over_six and fmt.square:
        return f"{fmt.name} adds the errors of a block in one sequence, which no kernel does"
    from nybble.kernels.cuda import reasons

    return reasons.device(torch.device("cuda")) if torch.cuda.is_available() else "there is no CUDA device"


def _served(specification: Any, front: str, name: str) -> Callable[..., Any]:
    """The function `name` of the module `front`, where it serves, else the specification."""
    plain = getattr(specification, name)

    def run(*arguments: Any, **named: Any) -> Any:
        from nybble.kernels.cuda import reasons

        first = arguments[0] if arguments else next(iter(named.values()))
        if dispatch.forced() or reasons.device(first.device) is not None:
            return plain(*arguments, **named)
        served = getattr(importlib.import_module(f"nybble.kernels.cuda.{front}"), name)
        if first.device.index == torch.cuda.current_device():
            return served(*arguments, **named)
        with torch.cuda.device(first.device):
            return served(*arguments, **named)

    return run


def _both(x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    from nybble.kernels.cuda import reasons

    if dispatch.forced() or reasons.device(x.device) is not None:
        return launch_both.twice(x, *arguments, **named)
    with torch.cuda.device(x.device):
        return launch_both.launch(x, *arguments, **named)


def register() -> None:
    """Make the Triton kernels the implementation of the ops for CUDA tensors, where triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return
    dispatch.provide("cuda", _can_run)
    for name in ("quantize", "dequantize", "fake_quantize", "requantize", "fake_requantize"):
        getattr(direct, name).register_kernel("cuda", _served(reference, "front", name))
    for name, specification in fused.SPECIFICATIONS.items():
        front = {weight_codes: "front", expert_swiglu: "swiglu_front"}.get(specification, "experts_front")
        getattr(fused, name).register_kernel("cuda", _served(specification, front, name))
    direct.hadamard.register_kernel("cuda", _served(hadamard, "launch_hadamard", "transform"))
    launch_both.fake_quantize_both.register_kernel("cuda", _both)
