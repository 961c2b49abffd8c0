"""A mode in which a token's numbers do not depend on what else is in its batch.

Inside `batch_invariant()` the products, reductions and attention of a forward pass take one fixed order of
additions: a token gets the same bits alone or among others, in a prompt's chunk or one at a time, padded or
packed. The sampler's log-probabilities then equal those that a trainer computes again, bit for bit. The
quantisers need nothing of the kind: with an outer scale a token, blocks never look at another token.

On CPUs everything goes through `models.cpu.exact` and the row-wise kernels that the models use anyway; on
CUDA through Triton kernels of one tile size (`kernels.cuda.invariant`). Backward passes are not touched: they
run outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nybble.errors import NybbleError
from nybble.formats.grouped import group_slices
from nybble.models.cpu import exact

aten = torch.ops.aten
SHORT_SUM = 32
"""Terms. The choice looks at the sum alone: by the number of products, bits would depend on the batch."""
Rule = Callable[..., Any]


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Context in which forward passes are independent of the batch; does nothing unless `enabled`."""
    if not enabled:
        yield
        return
    with _FixedOrder():
        yield


class _FixedOrder(TorchDispatchMode):
    """Replaces each operation whose order of additions would follow the shape of the whole tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        rule = _RULES.get(func)
        if rule is None or not args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        return rule(*args, **(kwargs or {}))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """a [M, K] @ b [K, N], accumulated in FP32."""
    dtype = a.dtype if dtype is None else dtype
    if a.device.type == "cpu":
        return exact.matmul(a, b).to(dtype)
    from nybble.kernels.cuda import invariant

    return invariant.matmul(a, b, dtype)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    y = _product(a, b, out_dtype)
    return y if out is None else out.copy_(y)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    y = _product(a, b, torch.float32)
    return ((y if alpha == 1 else y * alpha) + (bias if beta == 1 else bias * beta)).to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a [n, M, K] @ b [n, K, N]: short sums a term at a time for all n, longer ones by products."""
    if a.shape[2] > SHORT_SUM:
        return torch.stack([_product(x, y) for x, y in zip(a, b, strict=True)])
    out = torch.zeros(*a.shape[:2], b.shape[2], dtype=torch.float32, device=a.device)
    for k in range(a.shape[2]):
        out += a[:, :, k, None].float() * b[:, k, None, :].float()
    return out.to(a.dtype)


def _grouped_rows(a: Tensor, w: Tensor, offs: Tensor, transpose: bool, clear: bool = True) -> Tensor:
    """See `layers.gemm`: each expert's rows of a [R, C] times its own matrix; rows of none give zeros."""
    del clear
    return _grouped_mm(a, w.transpose(-2, -1) if transpose else w, offs)


def _grouped_mm(a: Tensor, w: Tensor, offs: Tensor, *rest: Any, **named: Any) -> Tensor:
    """a [R, C], rows sorted by expert, times w [E, C, N]."""
    if any(value is not None for value in (*rest, *named.values())) or w.dim() != 3:
        raise NybbleError("the batch-invariant mode knows grouped products of rows with matrices alone")
    if a.device.type != "cpu":
        from nybble.kernels.cuda import invariant

        return invariant.grouped_matmul(a, w, offs)
    out = a.new_zeros(a.shape[0], w.shape[-1])
    for e, part in enumerate(group_slices(offs)):
        if part.stop > part.start:
            out[part] = _product(a[part], w[e])
    return out


def _attend(*arguments: Any) -> Tensor:
    if arguments[0].device.type == "cpu":
        return exact.attend(*arguments)
    from nybble.kernels.cuda import invariant

    return invariant.attend(*arguments)


def _no_tiles(*_: Any) -> Tensor:
    raise NybbleError("the batch-invariant mode does not know fused attention; set model.flex = False")


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    axes = list(range(x.dim())) if dim is None else [d % x.dim() for d in dim]
    if axes != [x.dim() - 1]:
        return aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    flat = x.reshape(-1, x.shape[-1]).float()
    y = _product(flat, flat.new_ones(flat.shape[1], 1)).view(*x.shape[:-1], 1)
    return (y if keepdim else y.squeeze(-1)).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None or [d % x.dim() for d in dim] != [x.dim() - 1]:
        return aten.mean.dim(x, dim, keepdim, dtype=dtype)
    return (_sum(x, dim, keepdim, dtype=torch.float32) / x.shape[-1]).to(dtype or x.dtype)


def _norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if ord != 2 or dim is None or [d % x.dim() for d in dim] != [x.dim() - 1]:
        return aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    return _sum(x.float().square(), dim, keepdim, dtype=torch.float32).sqrt().to(dtype or x.dtype)


def _elementwise(function: Callable[[Tensor], Tensor], own: Any) -> tuple[Rule, Rule]:
    """A function of one number and its in-place form; on CPUs torch's differ between vectors and tails."""

    def fresh(x: Tensor) -> Tensor:
        return function(x.float()).to(x.dtype) if x.device.type == "cpu" else own(x)

    def in_place(x: Tensor) -> Tensor:
        return x.copy_(fresh(x))

    return fresh, in_place


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """On CUDA the order within a row depends on where the row begins in memory: all begin alike if padded."""
    room = -x.shape[-1] % 8
    if x.device.type == "cpu" or room == 0 or dim % x.dim() != x.dim() - 1:
        return aten._log_softmax.default(x, dim, half_to_float)
    padded = torch.nn.functional.pad(x, (0, room), value=-torch.inf)
    return aten._log_softmax.default(padded, dim, half_to_float)[..., : x.shape[-1]]


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a * b if value == 1 else a * b * value)


def _addcmul_(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x.add_(a * b if value == 1 else a * b * value)


_sigmoid, _sigmoid_ = _elementwise(exact.sigmoid, aten.sigmoid.default)
_tanh, _tanh_ = _elementwise(exact.tanh, aten.tanh.default)
_log, _log_ = _elementwise(exact.log, aten.log.default)

_RULES: dict[Any, Rule] = {
    aten._grouped_mm.default: _grouped_mm,
    aten.mm.default: _mm,
    aten.mm.out: _mm,
    aten.mm.dtype: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _norm,
    aten.sigmoid.default: _sigmoid,
    aten.sigmoid_.default: _sigmoid_,
    aten.tanh.default: _tanh,
    aten.tanh_.default: _tanh_,
    aten.log.default: _log,
    aten.log_.default: _log_,
    aten._log_softmax.default: _log_softmax,
    aten.addcmul.default: _addcmul,
    aten.addcmul_.default: _addcmul_,
}


def _register() -> None:
    """The ops of the rooms below, which exist once those are imported."""
    import nybble.layers.gemm
    import nybble.models.inkling2.attend
    import nybble.models.inkling2.fused  # noqa: F401

    _RULES[torch.ops.nybble.grouped_rows.default] = _grouped_rows
    _RULES[torch.ops.nybble.relative_attention.default] = _attend
    _RULES[torch.ops.nybble.fused_relative_attention.default] = _no_tiles


_register()
