"""Triton under its two guises: compiled for a GPU, or interpreted on the CPU (TRITON_INTERPRET=1, for tests).

Kernels take `ASM`: where it is true they use single PTX instructions of Hopper and later for what Triton has
no spelling for (rounding towards zero, the reciprocal, E4M3 conversions); where it is false, the same
functions in plain Triton. Both give the same bits.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
OWN_LAUNCH = os.environ.get("NYBBLE_OWN_LAUNCH") == "1" and triton.__version__.startswith("3.6.")
"""Off unless asked for, until the conformance suite has run with it on a GPU."""
MIN_CAPABILITY = (9, 0)


@cache
def use_asm(device: torch.device) -> bool:
    """Whether kernels on `device` may use Hopper's instructions."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def whole_key(key: Tensor) -> Tensor:
    """The int64 [4] that kernels read of a rounding key, whose `first` may be left out."""
    return key.contiguous() if key.shape[0] == 4 else pad(key, (0, 1))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class Launched:
    """A Triton kernel that finds what it compiled by itself.

    Triton looks at every argument, option and global variable at each launch, which takes 0.2 ms of the host
    for kernels with as many as these have: longer than they run. Here the arguments are looked at once, for
    what Triton specialises code on: types, divisibility by 16, and the value 1. Used if OWN_LAUNCH says so,
    with the launcher of Triton 3.6 alone. Not yet run on a GPU.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._compiled: dict[Any, Any] = {}
        if not INTERPRETED:
            self._names = tuple(function.arg_names)
            self._constant = tuple(p.is_constexpr for p in function.params)
            self._plain = tuple(p.do_not_specialize for p in function.params)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid) if OWN_LAUNCH and not INTERPRETED else self.function[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        device = torch.cuda.current_device()
        kinds = tuple(map(self._kind, arguments, self._constant, self._plain))
        key = (device, kinds, *options.items())
        found = self._compiled.get(key)
        if found is None or triton.knobs.runtime.launch_enter_hook.calls:
            kernel = self.function[grid](*arguments, **options)
            self._compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
            return
        run, function, metadata = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        constants = [options[name] for name in self._names[len(arguments) :]]
        whole = (*grid, *(1,) * (3 - len(grid)))
        run(*whole, stream, function, metadata, None, None, None, *arguments, *constants)

    @staticmethod
    def _kind(value: Any, constant: bool, plain: bool) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if value is None or constant or not isinstance(value, int):
            return value
        small = -(1 << 31) <= value < 1 << 31
        return small if plain else (value == 1, value % 16 == 0, small)
