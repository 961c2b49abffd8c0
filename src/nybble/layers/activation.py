"""The activation between the two products of an expert, and its derivative.

Known ones have their derivative written out: an elementwise pass costs as much as a product of small experts
on a CPU, and autograd makes a dozen of them. Any other activation goes through torch.func.vjp.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation:
    """h [R, I] of the up product: [R, 2I] of gate and up beside each other, or [R, I] without a gate."""

    def __init__(self, module: nn.Module) -> None:
        self.function, self.known = _find(module)
        self.act: Any = module.act_fn
        self.caps = _caps(self.act) if hasattr(module, "gate_up_proj") else None
        """Caps of a SwiGLU: (0, 0) for the plain one; None for other activations."""
        if self.known is silu_backward:
            self.caps = (0.0, 0.0)
        # Our own soft-capped SwiGLU has kernels for CPUs.
        self.fused = hasattr(self.act, "rows_backward")

    def __call__(self, gate_up: Tensor) -> Tensor:
        """The model's own activation."""
        if self._by_kernel(gate_up):
            return cast(Tensor, self.act.rows(gate_up))
        return self.function(gate_up)

    def backward(self, gate_up: Tensor, dh: Tensor) -> Tensor:
        """Gradient at gate_up [R, 2I] for dh [R, I], in FP32."""
        gate_up, dh = gate_up.float(), dh.float()
        if self._by_kernel(gate_up):
            return cast(Tensor, self.act.rows_backward(gate_up, dh))
        if self.known is not None:
            return self.known(gate_up, dh)
        out: Tensor = torch.func.vjp(self.function, gate_up)[1](dh)[0]
        return out

    def _by_kernel(self, gate_up: Tensor) -> bool:
        on_cpu = gate_up.device.type == "cpu" and gate_up.dtype == torch.float32
        return self.fused and on_cpu and not torch.compiler.is_compiling()


def _find(module: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor] | None]:
    act: Any = module.act_fn
    if not hasattr(module, "gate_up_proj"):
        squared = type(act).__name__ in ("ReLUSquared", "ReLUSquaredActivation")
        return act, relu_squared_backward if squared else None
    caps = _caps(act)
    if caps is not None:
        return _two(act), lambda x, dh: softcapped_backward(x, dh, *caps)
    if hasattr(module, "_apply_gate"):
        apply_gate: Any = module._apply_gate
        default = getattr(apply_gate, "__name__", "") == "_default_apply_gate"
    else:
        default = len(inspect.signature(act.forward if isinstance(act, nn.Module) else act).parameters) == 1
        apply_gate = _gated(act) if default else _two(act)
    silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" or act is F.silu
    return apply_gate, silu_backward if silu and default else None


def _two(act: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate, up)

    return apply


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    return apply


def _caps(act: Any) -> tuple[float, float] | None:
    """The caps of a soft-capped SwiGLU, ours or transformers'."""
    if hasattr(act, "gate_cap") and hasattr(act, "up_cap"):
        return float(act.gate_cap), float(act.up_cap)
    gate: Any = getattr(act, "gate_softcap", None)
    up: Any = getattr(act, "up_softcap", None)
    if hasattr(gate, "softcap") and hasattr(up, "softcap"):
        return float(gate.softcap), float(up.softcap)
    return None


def softcapped_backward(gate_up: Tensor, dh: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    """Gradient of a tanh(g / a) sigmoid(g) b tanh(u / b), as in Inkling 2, at [R, 2I] FP32 for dh [R, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    s, tg, tu = torch.sigmoid(gate), (gate / gate_cap).tanh_(), (up / up_cap).tanh_()
    # With l = tanh(g / a) s: dl/dg = s (1 - tanh^2) / a + l (1 - s), and a b l tanh(u / b) is the output.
    left = tg * s
    slope = torch.addcmul(s, left, tg, value=-1.0).div_(gate_cap)
    slope.add_(left).addcmul_(left, s, value=-1.0)
    dgate = slope.mul_(tu).mul_(dh).mul_(gate_cap * up_cap)
    dup = left.addcmul_(left * tu, tu, value=-1.0).mul_(dh).mul_(gate_cap)
    return torch.cat([dgate, dup], dim=-1)


def relu_squared_backward(x: Tensor, dh: Tensor) -> Tensor:
    """Gradient of max(x, 0)^2 at [R, I] FP32 for dh [R, I]."""
    return torch.relu(x).mul_(dh).mul_(2.0)


def silu_backward(gate_up: Tensor, dh: Tensor) -> Tensor:
    """Gradient of silu(g) * u at [R, 2I] FP32 for dh [R, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    y = gate * s
    # d silu = s + y (1 - s)
    slope = torch.addcmul(s, y, s, value=-1.0).add_(y)
    return torch.cat([slope.mul_(up).mul_(dh), y.mul_(dh)], dim=-1)
