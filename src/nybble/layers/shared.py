"""An operand that several layers make of one tensor, as projections of one hidden state do: made once."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nybble.layers.weight_cache import tag_of
from nybble.recipes import Operand

T = TypeVar("T")


class LastOperand:
    """The last operand that was made, for the next layer that needs the same."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it, and free its memory."""
        self._tag: tuple[object, ...] = ()
        self._made: Any = None

    def get(self, x: Tensor, spec: Operand, what: tuple[object, ...], make: Callable[[], T]) -> T:
        """What `make` gives of x under `spec`, which with `what` says all that the result depends on.

        Random draws differ between layers, and neither compiled graphs nor inference tensors tell whether a
        tensor has changed: then it is always made.
        """
        if not spec.quantised or spec.rounding != "nearest" or spec.hadamard or spec.subtract_mean:
            return make()
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_inference():
            return make()
        tag = (spec, *what, x.stride(), *tag_of(x, 0))
        if tag != self._tag:
            self.clear()
            self._made, self._tag = make(), tag
        return cast(T, self._made)

    def __reduce__(self) -> tuple[type["LastOperand"], tuple[()]]:
        # A copy or a pickle begins without one.
        return LastOperand, ()
