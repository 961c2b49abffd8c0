"""What is kept of a weight's operands within a step (between calls of `set_step`), and used again only while
the parameter is the same tensor, unchanged: same storage, version, dtype and device. Without `set_step`
nothing is kept."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nybble.layers.operand import Codes, Values

VALUES_LIMIT = {"cpu": 64 << 20, "cuda": 512 << 20}
"""cache = "auto" keeps values of operands up to this many bytes and codes of larger ones. Values save a
dequantisation in each pass, which on a CPU is a quarter of the product of a small expert; codes take 4.5 bits
a value, not 16 or 32."""


class WeightCache:
    """Operands of one weight of one module."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.tag: tuple[object, ...] = ()
        self.kept: dict[str, Codes | Values] = {}

    def get(self, name: str, tag: tuple[object, ...]) -> Codes | Values | None:
        """The operand called `name` if it is still that of the weight that `tag` describes."""
        if tag != self.tag:
            self.tag, self.kept = tag, {}
        return self.kept.get(name)

    def form(self, weight: Tensor, dtype: torch.dtype) -> str:
        """Whether "codes" or "values" of an operand of this size are kept."""
        if self.mode != "auto":
            return self.mode
        size = weight.numel() * dtype.itemsize
        return "values" if size <= VALUES_LIMIT.get(weight.device.type, 0) else "codes"

    def __reduce__(self) -> tuple[type["WeightCache"], tuple[str]]:
        # A copy or a pickle has weights of its own, so it begins without operands.
        return WeightCache, (self.mode,)


def tag_of(weight: Tensor, generation: int) -> tuple[object, ...]:
    """What must be equal for a cached operand of `weight` to be used again.

    The storage is named by a weak reference, which keeps its name (not its memory) from being given away:
    after `.to()` and back a weight may well lie at its old address with other values.
    """
    storage = StorageWeakRef(weight.untyped_storage())
    return (
        generation,
        storage,
        weight.data_ptr(),
        weight._version,
        weight.dtype,
        weight.device,
        weight.shape,
    )
