"""Custom ops called without their wrapping where nobody looks at ops: it costs more than many a kernel.

`direct.quantize(...)` and the others take and return what `torch.ops.nybble.quantize(...)` and the others do.
Compiled graphs, dispatch modes and tensor subclasses still see the ops.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nybble.formats import ops


class Op:
    """A custom op, and the function of each kind of device that serves it."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.register_fake = op.register_fake
        self._served: dict[str, Callable[..., Any]] = {}

    def register_kernel(self, device_type: str, function: Callable[..., Any]) -> None:
        """Let `function` serve tensors of a device type, by the op and by direct calls."""
        self.op.register_kernel(device_type)(function)
        self._served[device_type] = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        x = arguments[0]
        if unseen(x) and (function := self._served.get(x.device.type)) is not None:
            with torch.no_grad():
                return function(*arguments, **named)
        return self.op(*arguments, **named)


def unseen(x: Any) -> bool:
    """Whether no compiler, mode or subclass would see an op on `x`."""
    return _plain(x) and eager()


def eager() -> bool:
    """Whether operators run as they are called: no compiler traces them, and no mode looks at them."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def by_hand(x: Any) -> bool:
    """Whether passes by hand serve: FP32 on a CPU, where nothing wants to see every operator."""
    return by_hand_in_any_mode(x) and eager()


def by_hand_in_any_mode(x: Any) -> bool:
    """Whether passes that stay under a mode serve: FP32 on a CPU, not traced by a compiler.

    They compute each row, or token after token, by itself: what the batch-invariant mode asks of operators,
    they do already.
    """
    here = x.device.type == "cpu" and x.dtype == torch.float32
    return here and _plain(x) and not torch.compiler.is_compiling()


def _plain(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter)


quantize = Op(ops.quantize)
dequantize = Op(ops.dequantize)
fake_quantize = Op(ops.fake_quantize)
requantize = Op(ops.requantize)
fake_requantize = Op(ops.fake_requantize)
hadamard = Op(ops.hadamard)
