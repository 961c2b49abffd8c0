"""The Mamba-2 layer: a projection in, a short convolution, the recurrence, a gated norm, a projection out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import NemotronHConfig

from nybble.models.context import Context
from nybble.models.conv import causal_conv
from nybble.models.linear import Linear
from nybble.models.nemotron_h import kernels
from nybble.models.nemotron_h.scan import Shape, scan
from nybble.models.norms import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """RMS norm of x * silu(gate) over groups of the last axis, [..., D] -> the same in FP32."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.groups, self.eps)


class Mamba2(nn.Module):
    """[B, S, hidden] -> [B, S, hidden].

    `A_log`, `D` and `dt_bias` [H] are used in FP32. A step is softplus(dt + dt_bias), at least
    `time_step_min`, in cached decoding too.
    """

    def __init__(self, config: NemotronHConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.kernel, self.chunk = layer, config.conv_kernel, config.chunk_size
        self.shape = Shape(
            config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
        )
        # transformers bounds steps by this field, and leaves time_step_limit alone
        self.smallest_step = config.time_step_min
        heads, inner, width = self.shape.H, self.shape.H * self.shape.P, self.shape.width
        self.conv1d = nn.Conv1d(  # holds the weight [width, 1, kernel] and bias
            width, width, self.kernel, groups=width, padding=self.kernel - 1, bias=config.use_conv_bias
        )
        self.in_proj = Linear(config.hidden_size, inner + width + heads, bias=config.use_bias)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.norm = GatedRMSNorm(inner, self.shape.G, config.layer_norm_epsilon)
        self.D = nn.Parameter(torch.ones(heads))
        self.out_proj = Linear(inner, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shape = self.shape
        gate, xbc, dt = self.in_proj(x).split([shape.H * shape.P, shape.width, shape.H], dim=-1)
        A, D = -self.A_log.float().exp(), self.D.float()
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        if context.cache is None and kernels.cannot_run(x.device, self.kernel) is None:
            dt_bias, limit, chunk = self.dt_bias.float(), self.smallest_step, self.chunk
            y = kernels.conv_and_scan(
                xbc, dt, weight, bias, A, D, dt_bias, limit, shape, chunk, context.segments
            )
        else:
            y = self._mix(xbc, F.softplus(dt.float() + self.dt_bias.float()), A, D, context)
        return self.out_proj(self.norm(y, gate).to(x.dtype))

    def _mix(self, xbc: Tensor, step: Tensor, A: Tensor, D: Tensor, context: Context) -> Tensor:
        dtype, xbc = xbc.dtype, xbc.float()
        # the last tap of a cross-correlation weighs the current token: lag 0
        taps, bias = self.conv1d.weight.float()[:, 0].flip(-1).T, self.conv1d.bias
        past = context.conv_state(xbc, self.layer, 0, self.kernel)
        bias = None if bias is None else bias.float()
        mixed = causal_conv(xbc, taps, bias, past, context.same, silu=True)
        if xbc.is_cuda:
            mixed = mixed.to(dtype)
        cache = context.cache
        y, state = scan(
            mixed,
            step.clamp(min=self.smallest_step),
            A,
            D,
            self.shape,
            context.starts,
            None if cache is None else cache.states.get(self.layer),
            keep_state=cache is not None,
        )
        if cache is not None and state is not None:
            cache.states[self.layer] = state
        return y
