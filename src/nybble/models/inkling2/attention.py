"""Attention of Inkling 2: a relative bias computed from the hidden states, sinks and a gated output."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Inkling2TextConfig

from nybble.models.context import Context
from nybble.models.cpu.heads import Numbers
from nybble.models.cuda import on_gpu
from nybble.models.inkling2.attend import attend_chunks
from nybble.models.inkling2.conv import DynamicShortConvolution, ShortConvolution
from nybble.models.inkling2.flex import attend_flex
from nybble.models.inkling2.fused import attend_fused
from nybble.models.inkling2.whole_attention import AttentionBetween, Plan, WholeAttention, tokens
from nybble.models.linear import Linear
from nybble.models.norms import l2_clip, rms_norm
from nybble.models.whole import common_precision, unwatched


class ScaledClip(nn.Module):
    """L2 clip after a learned scale [heads, D]; [..., heads, D] -> the same shape and dtype."""

    def __init__(self, heads: int, size: int, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.scale = nn.Parameter(torch.ones(heads, size))

    def forward(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return l2_clip(x, self.threshold, self.scale, gain, x.dtype)


class QueryProjection(nn.Module):
    """[B, S, H] -> queries [B, S, heads, D], clipped, and scaled by `gain` [B or 1, S, 1, 1]."""

    def __init__(self, hidden: int, heads: int, size: int, threshold: float) -> None:
        super().__init__()
        self.linear = Linear(hidden, heads * size)
        self.norm = ScaledClip(heads, size, threshold)
        self.heads = heads

    def forward(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return self.norm(self.linear(x).unflatten(-1, (self.heads, -1)), gain)


class KeyValueProjection(nn.Module):
    """[B, S, H] -> keys (clipped) or values (RMS-normalised) [B, S, heads, D], after a short convolution."""

    def __init__(
        self, config: Inkling2TextConfig, heads: int, size: int, layer: int, slot: int, dynamic: bool
    ) -> None:
        super().__init__()
        self.heads, self.is_key = heads, slot == 0
        self.threshold, self.eps = config.qk_l2_clip_threshold, config.rms_norm_eps
        self.linear = Linear(config.hidden_size, heads * size)
        kernel, width = config.conv_kernel_size, heads * size
        self.sconv: ShortConvolution | DynamicShortConvolution
        if dynamic:
            self.sconv = DynamicShortConvolution(width, config.hidden_size, heads, kernel, layer, slot)
        else:
            self.sconv = ShortConvolution(width, kernel, layer, slot)

    def forward(self, x: Tensor, context: Context, driver: Tensor | None = None) -> Tensor:
        """`driver` [B, S, H] is what dynamic taps are computed from."""
        y = self.linear(x)
        if isinstance(self.sconv, DynamicShortConvolution):
            y = self.sconv(y, context, x if driver is None else driver)
        else:
            y = self.sconv(y, context)
        y = y.unflatten(-1, (self.heads, -1))
        if self.is_key:
            return l2_clip(y, self.threshold, dtype=x.dtype)
        normed: Tensor = rms_norm(y, None, self.eps, x.dtype)
        return normed


class GatedOutputProjection(nn.Module):
    """Attention output [B, S, heads * D], gated by a sigmoid of the layer's input, -> [B, S, H]."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.linear = Linear(width, hidden)

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        return self.linear(_gated(attended, self.gate_proj(x)))


def _gated(attended: Tensor, gate: Tensor) -> Tensor:
    if on_gpu(attended):
        from nybble.models.cuda.gate import Gated

        return Gated.apply(attended, gate)
    return (attended.float() * torch.sigmoid(gate.float())).to(attended.dtype)


class RelativePositionBias(nn.Module):
    """Each token's weights [B, S, heads, d_rel] of the bias profiles `proj` [d_rel, extent]."""

    def __init__(self, hidden: int, heads: int, d_rel: int, extent: int, threshold: float) -> None:
        super().__init__()
        self.linear = Linear(hidden, heads * d_rel)
        self.norm = ScaledClip(heads, d_rel, threshold)
        self.proj = nn.Parameter(torch.empty(d_rel, extent))
        self.heads = heads

    def forward(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return self.norm(self.linear(x).unflatten(-1, (self.heads, -1)), gain)


class Attention(nn.Module):
    """One attention layer; sliding or full by the config's `layer_types`.

    A full layer takes three inputs (for queries, keys and values), convolves keys and values with dynamic
    taps and scales queries and relative states with the logarithm of the position.
    """

    def __init__(self, config: Inkling2TextConfig, layer: int) -> None:
        super().__init__()
        sliding = config.layer_types[layer] == "hybrid_sliding"
        heads = config.swa_num_attention_heads if sliding else config.num_attention_heads
        key_heads = config.swa_num_key_value_heads if sliding else config.num_key_value_heads
        size = config.swa_head_dim if sliding else config.head_dim
        hidden = config.hidden_size
        extent = config.sliding_window_size if sliding else config.rel_extent
        self.layer, self.scale = layer, size**-0.5
        self.window = config.sliding_window_size if sliding else None
        self.floor, self.alpha = config.log_scaling_n_floor, config.log_scaling_alpha
        self.q_proj = QueryProjection(hidden, heads, size, config.qk_l2_clip_threshold)
        self.k_proj = KeyValueProjection(config, key_heads, size, layer, 0, dynamic=not sliding)
        self.v_proj = KeyValueProjection(config, key_heads, size, layer, 1, dynamic=not sliding)
        self.o_proj = GatedOutputProjection(hidden, heads * size)
        self.sink_proj = Linear(hidden, heads)
        self.relative_position_bias = RelativePositionBias(
            hidden, heads, config.d_rel, extent, config.rel_l2_clip_threshold
        )

    @property
    def readers(self) -> tuple[int, ...]:
        """How many projections read each of the layer's inputs: the only one, or those for queries, keys and
        values."""
        return (6,) if self.window is not None else (4, 2, 2)

    def forward(self, inputs: Sequence[Tensor], context: Context) -> Tensor:
        """`inputs` are [B, S, H], each as often as `readers` says; -> [B, S, H]."""
        x, x_rel, x_sink, x_gate, *rest = inputs
        if self.window is None:
            key_input, key_driver, value_input, value_driver = rest
        else:
            (key_input, value_input), key_driver, value_driver = rest, None, None
        gain = None
        if self.window is None:
            gain = context.length_gain(x.shape[1], self.floor, self.alpha, x.device)
        others = context.cache is not None or context.fused or self.window in context.block_masks
        if not others and unwatched(self, x):
            return self._whole(inputs, context, gain)
        q = self.q_proj(x, gain)
        k = self.k_proj(key_input, context, key_driver)
        v = self.v_proj(value_input, context, value_driver)
        rel = self.relative_position_bias(x_rel, gain)
        proj, sink = self.relative_position_bias.proj, self.sink_proj(x_sink)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if context.fused and context.past == 0:
            out = attend_fused(
                q, k, v, rel, proj, sink,
                window=self.window, scale=self.scale, documents=context.documents,
            )  # fmt: skip
        elif self.window in context.block_masks:
            mask = context.block_masks[self.window]
            out = attend_flex(q, k, v, rel, proj, sink, scale=self.scale, mask=mask)
        else:
            keys = context.key_segments(k.shape[1])
            out = attend_chunks(
                q, k, v, rel, proj, sink, window=self.window, scale=self.scale,
                query_segments=context.segments, key_segments=keys,
            )  # fmt: skip
        return self.o_proj(out.flatten(-2), x_gate)

    def _whole(self, inputs: Sequence[Tensor], context: Context, gain: Tensor | None) -> Tensor:
        """`forward` as one operation."""
        B, S, H = inputs[0].shape
        rows = [x.reshape(B * S, H) for x in inputs]
        k, v, rel = self.k_proj, self.v_proj, self.relative_position_bias
        own = (self.q_proj.linear, self.o_proj.gate_proj, rel.linear, self.sink_proj)
        linears: tuple[Linear, ...] = (*own, k.linear, v.linear)
        if isinstance(k.sconv, DynamicShortConvolution) and isinstance(v.sconv, DynamicShortConvolution):
            linears = (*own, k.linear, k.sconv.weight_proj, v.linear, v.sconv.weight_proj)
        numbers = Numbers(
            min(self.window or S, S), np.float32(self.scale), np.float32(self.q_proj.norm.threshold),
            np.float32(rel.norm.threshold), np.float32(v.eps), k.sconv.kernel,
        )  # fmt: skip
        small = (self.q_proj.norm.scale, rel.norm.scale, rel.proj, k.sconv.taps(), v.sconv.taps())
        output = self.o_proj.linear
        precision = common_precision((*linears, output))
        plan = Plan(self.readers, tokens(context, B, S, gain), numbers, precision == "bf16")
        if precision is not None:
            starts = [sum(self.readers[:i]) for i in range(len(self.readers))]
            weights = (linear.weight for linear in linears)
            y = WholeAttention.apply(plan, *(rows[i] for i in starts), *small, *weights, output.weight)
        else:
            made = (linear(x) for x, linear in zip(rows, linears, strict=True))
            y = output(AttentionBetween.apply(plan, *small, *made))
        return y.view(B, S, H)
