"""Routed experts whose GEMMs take the operands that a recipe names.

Legend: T tokens, k experts a token, E experts, H hidden, I expert width, R = T * k routed rows, sorted by
expert.
    up    gate_up[R,2I] = x[R,H] @ Wup[E,2I,H].T        h = act(gate_up)
    down  out[R,H]      = h[R,I] @ Wdown[E,H,I].T       y[t] = sum over its k rows of w[r] * out[r]
Rows of one expert are one group: blocks along T never span two experts.
"""

import copyreg
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nybble.kernels.cpu.rows import sort
from nybble.kernels.direct import by_hand
from nybble.layers import kept
from nybble.layers.activation import Activation
from nybble.layers.expert_pass import Plan
from nybble.layers.experts_by_hand import ExpertsByHand
from nybble.layers.fused_experts import FusedExperts, fits
from nybble.layers.linear import planned
from nybble.layers.operand import Codes
from nybble.layers.plain_experts import PlainExperts
from nybble.layers.routing import route
from nybble.layers.step import StepState
from nybble.layers.weight_cache import WeightCache
from nybble.layers.weights import Spec, Weight

DOWN = 8
"""Added to the operand numbers of the down product, so that its draws are not those of the up product."""


class Exchange(Protocol):
    """Takes tokens to the experts of other ranks and brings the results back; see `nybble.parallel`."""

    def specs(self, up: Spec, down: Spec) -> tuple[Spec, Spec]:
        """The precision of products whose operands may arrive quantised."""
        ...

    def __call__(
        self,
        experts: "Experts",
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor: ...


class Gather(Protocol):
    """Brings together the weights of experts of which ranks hold parts; see `nybble.parallel`."""

    def __call__(self, experts: "Experts", part: Tensor, which: int) -> tuple[Tensor, Codes]:
        """(the shape of a weight whose gradient goes to those who hold it, the codes of its operand of
        fprop); `part` is what is held here of the first weight (0) or the second (1)."""
        ...


class Experts(nn.Module):
    """Fused experts with the GEMMs of a recipe; `convert` mixes it into the model's own class."""

    down_proj: nn.Parameter
    specs: tuple[Spec, Spec]
    step_state: StepState
    weight_caches: tuple[WeightCache, WeightCache]
    keep: str
    """"recompute" or "activations"."""
    exchange: Exchange | None = None
    """Where other ranks have experts of this module too."""
    first_expert: int = 0
    """Experts on ranks before this one."""
    gather: Gather | None = None
    """Where ranks hold parts of the weights that this one computes with."""

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        rows: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k]; an index of E or more is an expert that is not here, and adds nothing.
            top_k_weights: [T, k].
            rows: int64 [T], what each token counts as in random draws; its index in the batch when None.
            meanwhile: work of the caller, done while tokens travel to other ranks, if they do.
        Returns:
            [T, H] in the dtype of hidden_states, summed in FP32.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = self.step_state.rows(x.shape[0], x.device) if rows is None else rows
        if self.exchange is None:
            y = self.compute(x, top_k_index, top_k_weights, rows)
            if meanwhile is not None:
                meanwhile()
        else:
            y = self.exchange(self, x, top_k_index, top_k_weights, rows, meanwhile)
        return y if y.shape == hidden_states.shape else y.view(hidden_states.shape)  # FSDP warns of views

    def compute(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        rows: Tensor | None,
        arrived: Codes | None = None,
    ) -> Tensor:
        """The same by the experts that are here.

        Args:
            x: [T, H].
            rows: int64 [T], what each token counts as in random draws; its own index when None.
            arrived: codes of x as the operand of fprop, where x came as those; x is then only a shape.
        """
        up, down = local(getattr(self, up_name(self))), local(self.down_proj)
        if arrived is None and self._rounds_by_hand(x, up):
            sorted_rows = sort(top_k_index, up.shape[0])
            act = self.by_pass()  # type: ignore[operator]  # of the model's own class
            out: Tensor = ExpertsByHand.apply(
                x, top_k_weights, up, down, *sorted_rows, act, True, self.keep == "activations"
            )
            return out
        up_codes = down_codes = None
        if self.gather is not None:
            (up, up_codes), (down, down_codes) = self.gather(self, up, 0), self.gather(self, down, 1)
        grad = torch.is_grad_enabled()
        recompute = self.keep == "recompute" and kept.repeatable(x, self.specs[0].gemms)
        plan = Plan(
            up=self._planned(up, 0)._replace(codes=up_codes),
            down=self._planned(down, 1)._replace(codes=down_codes),
            activation=Activation(self),
            k=top_k_index.shape[-1],
            keep_x=grad and (up.requires_grad or recompute),
            keep_h=grad and (down.requires_grad or top_k_weights.requires_grad),
            keep_gate_up=grad and not recompute,
            arrived=arrived,
        )
        order, ends, _ = route(top_k_index, up.shape[0])
        key, weight_key = self.step_state.keys(x.device)
        passes = FusedExperts if fits(x, plan, up.shape[0]) else PlainExperts
        y: Tensor = passes.apply(x, top_k_weights, up, down, order, ends, rows, key, weight_key, plan)
        return y

    def _rounds_by_hand(self, x: Tensor, up: Tensor) -> bool:
        """Whether all of it is plain BF16 on a CPU and all experts are here."""
        here = self.exchange is None and self.gather is None
        plain = up.dtype == torch.float32 and all(spec.rounds_to_bf16 for spec in self.specs)
        return here and plain and hasattr(self, "by_pass") and x.numel() > 0 and by_hand(x)

    def _planned(self, weight: Tensor, which: int) -> Weight:
        caches = self.weight_caches
        return planned(weight, self.specs[which], caches[which], self.step_state, self.first_expert)

    def extra_repr(self) -> str:
        return " ".join(self.specs[0].gemms.texts())

    def __reduce__(self) -> Any:
        # The class of a converted module is made at run time: it is found again from the model's own.
        return _rebuild, (type(self).__bases__[1],), self.__dict__


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward pass of Experts; isinstance checks against it still hold."""
    if original not in _CLASSES:
        _CLASSES[original] = type(original.__name__, (Experts, original), {"__module__": original.__module__})
    return _CLASSES[original]


def _rebuild(original: type[nn.Module]) -> Any:
    return copyreg.__newobj__(experts_class(original))  # type: ignore[attr-defined]


def up_name(module: nn.Module) -> str:
    """Name of the first weight: gated experts have gate_up_proj, others up_proj."""
    return "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"


def local(weight: Tensor) -> Tensor:
    """The part of a distributed weight that is here; a plain weight as it is."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
