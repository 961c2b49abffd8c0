"""The ops on CPU: numba kernels, spread over threads.

numba is imported, and kernels are compiled, when an op first runs.
"""

from typing import Any

from nybble.formats import reference
from nybble.formats.hadamard import transform
from nybble.formats.table import Format
from nybble.kernels import direct, dispatch


def _can_run(fmt: Format) -> str | None:
    return f"{fmt.name} is a cast, which torch does" if fmt.passthrough else None


def _implement(name: str) -> None:
    plain = transform if name == "hadamard" else getattr(reference, name)

    def run(*arguments: Any, **named: Any) -> Any:
        if dispatch.forced():
            return plain(*arguments, **named)
        from nybble.kernels.cpu import front

        return getattr(front, name)(*arguments, **named)

    getattr(direct, name).register_kernel("cpu", run)


def register() -> None:
    """Make the CPU kernels the implementation of `torch.ops.nybble.*` for CPU tensors."""
    dispatch.provide("cpu", _can_run)
    for name in ("quantize", "dequantize", "fake_quantize", "requantize", "fake_requantize", "hadamard"):
        _implement(name)
