"""The attention of `attend.py` by Triton kernels, as an op that `torch.compile` takes whole."""

import logging
from typing import Any

import torch
from torch import Tensor

from nybble.models.documents import Documents

_log = logging.getLogger(__name__)
_said: set[str] = set()


@torch.compiler.assume_constant_result
def why_not_fused(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], d_rel: int) -> str | None:
    """Why the kernels cannot serve heads of these sizes; None if they can. On GPUs it is logged, once."""
    if device.type != "cuda":
        return f"{device.type} devices have no attention kernel"
    try:
        from nybble.models.cuda import attend
    except ImportError:
        reason: str | None = "triton is not installed"
    else:
        reason = attend.reason(device, dtype, sizes, d_rel)
    if reason is not None and reason not in _said:
        _said.add(reason)
        _log.info("attention goes through FlexAttention: %s", reason)
    return reason


@torch.library.custom_op("nybble::fused_relative_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    segments: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from nybble.models.cuda import attend

    return attend.forward(q, k, v, rel, proj, sink, _documents(segments, first, last), window, scale)


@torch.library.custom_op("nybble::fused_relative_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    segments: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nybble.models.cuda import attend

    documents = _documents(segments, first, last)
    return attend.backward(dout, out, lse, q, k, v, rel, proj, sink, documents, window, scale)


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, S, H, _D = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, S, dtype=torch.float32)


@_backward.register_fake
def _(
    _dout: Tensor,
    _out: Tensor,
    _lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, rel, proj, sink))


def _documents(segments: Tensor | None, first: Tensor | None, last: Tensor | None) -> Documents | None:
    if segments is None or first is None or last is None:
        return None
    return Documents(segments, first, last)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for it


def _differentiate(ctx: Any, dout: Tensor, _dlse: None) -> tuple[Tensor | None, ...]:
    grads = _backward(dout, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*grads, None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_setup)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel: Tensor,
    proj: Tensor,
    sink: Tensor,
    *,
    window: int | None,
    scale: float,
    documents: Documents | None = None,
) -> Tensor:
    """The formula of `attend.py` for T = S, in tiles; scores and sums in FP32."""
    parts = (None, None, None) if documents is None else (documents.segments, documents.first, documents.last)
    out, _ = _forward(q, k, v, rel, proj, sink, *parts, window, scale)
    return out
