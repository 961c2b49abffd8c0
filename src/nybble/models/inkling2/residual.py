"""Attention residuals: a layer's input is a learned mixture of finished blocks and the running one.

Each source is RMS-normalised; a learned query scores it; a softmax over sources mixes them. Finished blocks
never change: all later layers share what `finished` makes of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import mix as fused
from nybble.models.cuda import on_gpu
from nybble.models.norms import RMSNorm, plain_rms_norm, rms_norm

EPS = 1e-6


class _MixNorm(torch.autograd.Function):
    """query [n, H], partial [T, H], n norm weights [H], m blocks [T, H] -> n times [T, H] mixed, normed."""

    @staticmethod
    def forward(ctx: Any, eps: float, query: Tensor, partial: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        n, H = query.shape
        scaled, partial, *others = (x.contiguous() for x in (query * H**-0.5, partial, *rest))
        ys, saved = fused.forward(scaled, partial, others[n:], others[:n], EPS, eps)
        ctx.save_for_backward(scaled, partial, *others, *saved)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        scaled, partial, *rest = ctx.saved_tensors
        n, (gains_and_blocks, saved) = len(dys), (rest[:-4], rest[-4:])
        gains, blocks = gains_and_blocks[:n], gains_and_blocks[n:]
        gradients = [dy.contiguous() for dy in dys]
        dq, dpartial, dblocks, dgains = fused.backward(gradients, scaled, partial, blocks, gains, saved)
        return None, dq * scaled.shape[1] ** -0.5, dpartial, *dgains, *dblocks


class Source(NamedTuple):
    """A tensor [B, S, H] on GPUs, and which one its kernels' gradients go to."""

    value: Tensor
    """What kernels read, detached; what is no kernel reads it as any tensor."""
    graph: Tensor
    """Without memory. Its dtype is that of its gradient."""


Block = Tensor | Source
"""What mixtures take of a block [B, S, H] that has ended: its RMS norm in FP32, or on GPUs the block itself,
which their kernel normalises: half the bytes as a rule."""


def finished(hidden: Tensor) -> Block:
    """The block [B, S, H] for mixtures."""
    if on_gpu(hidden):
        return _source(hidden)
    normed: Tensor = rms_norm(hidden, None, EPS)
    return normed


def _source(hidden: Tensor) -> Source:
    from nybble.models.cuda.blocks import StandIn

    return Source(hidden, StandIn.apply(hidden, EPS))


class BlockAttentionResidual(nn.Module):
    """Mixes finished blocks and the running one into one input per query.

    `query` is [H] for one query and [n, H] for n.
    """

    def __init__(self, hidden: int, queries: int = 1) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros((hidden,) if queries == 1 else (queries, hidden)))

    def forward(
        self,
        blocks: tuple[Block, ...],
        partial: Tensor,
        norms: tuple[RMSNorm, ...],
        copies: tuple[int, ...],
        dtype: torch.dtype,
        sum_dtype: torch.dtype | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor | Source, tuple[Block, ...]]:
        """The mixtures behind their norms, and what the next reader of the sources takes.

        Args:
            blocks: m from `finished`.
            partial: [B, S, H].
            norms: one for each query.
            copies: how many read each mixture.
            dtype: of the mixtures.
            sum_dtype: of the sum that partial becomes a part of next, if it has no other reader: on GPUs its
                gradient then stays in that dtype.

        Returns:
            Each mixture [B, S, H] as often as it is read; partial; blocks. On GPUs all of these are there
            so that the gradients of several readers are added in one pass, not by autograd.
        """
        if on_gpu(partial):
            from nybble.models.cuda.mix import Mix

            scales = [norm.weight for norm in norms]
            count = sum(copies)
            # a part of the model that is compiled makes norms, not sources
            ended = [x if isinstance(x, Source) else _source(x) for x in blocks]
            whole, stand_ins = [x.value for x in ended], [x.graph for x in ended]
            ys = Mix.apply(
                EPS, norms[0].eps, copies, dtype, sum_dtype, self._queries(), partial,
                *scales, *(x.detach() for x in whole), *stand_ins,
            )  # fmt: skip
            handed = ys[count] if sum_dtype is None else Source(partial, ys[count])
            return ys[:count], handed, tuple(map(Source, whole, ys[count + 1 :]))
        H, hooked = partial.shape[-1], any(norm._forward_hooks for norm in norms)
        partial, queries = partial.float(), self._queries().float()
        normed = tuple(rms_norm(x.value, None, EPS) if isinstance(x, Source) else x for x in blocks)
        if by_hand_in_any_mode(partial) and not hooked:
            weights = (norm.weight.float() for norm in norms)
            rows = (x.reshape(-1, H) for x in normed)
            ys = _MixNorm.apply(norms[0].eps, queries, partial.reshape(-1, H), *weights, *rows)
            mixed = [y.view(partial.shape).to(dtype) for y in ys]
        else:
            sources = plain_mix(partial, queries * H**-0.5, normed)
            mixed = [norm(x).to(dtype) for norm, x in zip(norms, sources, strict=True)]
        return tuple(y for y, n in zip(mixed, copies, strict=True) for _ in range(n)), partial, blocks

    def _queries(self) -> Tensor:
        """[n, H]."""
        return self.query.view(-1, self.query.shape[-1])


def plain_mix(partial: Tensor, query: Tensor, blocks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """query [n, H] over sqrt(H) -> n times [B, S, H]."""
    sources = (*blocks, plain_rms_norm(partial, None, EPS))
    # sums over features and over sources, not products of matrices: both are too thin for tensor cores
    scores = torch.stack([(source.unsqueeze(-2) * query).sum(-1) for source in sources], dim=-2)
    weights = torch.softmax(scores, dim=-2)  # [B, S, m + 1, n]
    outs = []
    for n in range(query.shape[0]):
        out = weights[..., 0, n, None] * sources[0]
        for m in range(1, len(sources)):
            out = out + weights[..., m, n, None] * sources[m]
        outs.append(out)
    return tuple(outs)
