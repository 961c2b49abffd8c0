"""The Mamba-2 recurrence by chunks: products within a chunk, a small scan over chunks (arXiv 2405.21060).

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t      h [N, P] of each head; B, C [N] shared by a group of heads
    y_t = C_t h_t + D x_t

With cum_i the sum of dt A over a chunk up to token i:
    near  y_i = sum_{j <= i} (C_i . B_j) exp(cum_i - cum_j) dt_j x_j
    far   y_i = exp(cum_i) C_i h,  h the state before the chunk
    h'        = exp(cum_end) h + sum_j exp(cum_end - cum_j) dt_j B_j x_j
Where a document starts, what lies before it is left out of each sum: exactly, not by a large decay.

Legend: B sequences of S tokens in n chunks of L; H heads of width P in G groups of R; N state.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels.direct import by_hand_in_any_mode
from nybble.models.cpu import scan as fused

CHUNK = 128
"""Tokens of a chunk: products fill a GPU's tiles."""


class Shape(NamedTuple):
    """Heads H of width P in G groups; each head has a state [N, P]."""

    H: int
    P: int
    G: int
    N: int

    @property
    def width(self) -> int:
        """Features of x, B and C beside each other."""
        return self.H * self.P + 2 * self.G * self.N


def scan(
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    shape: Shape,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence over whole sequences.

    Args:
        xbc: [B, S, H * P + 2 * G * N]: x, then B, then C.
        dt: [B, S, H] FP32, the step of each token and head.
        A: [H] FP32, negative.
        D: [H] FP32.
        shape: sizes.
        starts: [B, S] where each token's document starts, negative before the first token; None for one
            document that goes on from `state`.
        state: [B, G, N, R * P] FP32 before the first token, or None for zeros.
        keep_state: whether to return the state after the last token.

    Returns:
        y [B, S, H * P] FP32, and the state or None.
    """
    if xbc.numel() == 0:
        return xbc.new_zeros(*xbc.shape[:2], shape.H * shape.P, dtype=torch.float32), state
    if state is None and not keep_state and by_hand_in_any_mode(xbc):
        return _ScanByHand.apply(xbc, dt, A, D, shape, starts), None
    y, after = _chunked(xbc, dt, A, shape, starts, state)
    x = xbc[..., : shape.H * shape.P].unflatten(-1, (shape.H, shape.P))
    return y + (x.float() * D[:, None]).flatten(-2), after if keep_state else None


def _chunked(
    xbc: Tensor, dt: Tensor, A: Tensor, shape: Shape, starts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`scan` without the skip, in plain torch."""
    # products take the dtype of x on a GPU, as the published kernels do; sums, decays and states are FP32
    dtype = xbc.dtype if xbc.is_cuda else torch.float32
    H, P, G, N = shape
    R, (B, S) = H // G, xbc.shape[:2]
    L = min(CHUNK, S)
    pad = -S % L
    n = (S + pad) // L
    if pad:
        xbc, dt = F.pad(xbc, (0, 0, 0, pad)), F.pad(dt, (0, 0, 0, pad))
    x, b, c = xbc.split([H * P, G * N, G * N], dim=-1)
    b, c = (t.to(dtype).view(B, n, L, G, N).transpose(2, 3) for t in (b, c))  # [B, n, G, L, N]
    step = dt.view(B, n, L, G, R).permute(0, 1, 3, 4, 2)  # [B, n, G, R, L]
    cum = (step * A.view(G, R, 1)).cumsum(-1)
    u = x.float().view(B, n, L, G, R, P).permute(0, 1, 3, 4, 2, 5) * step[..., None]  # [B, n, G, R, L, P]

    row = torch.arange(L, device=xbc.device)
    seen = row[:, None] >= row  # [L, L]: does i see j
    if starts is not None:
        starts = torch.cat([starts, starts[:, -1:].expand(B, pad)], dim=1).view(B, n, L)
        # counted from the chunk's first row
        starts = starts - L * torch.arange(n, device=xbc.device)[:, None]
        seen = (seen & (row >= starts[..., None]))[:, :, None, None]
    gaps = (cum[..., :, None] - cum[..., None, :]).masked_fill(~seen, -torch.inf)
    weights = (c @ b.transpose(-1, -2))[:, :, :, None] * gaps.exp().to(dtype)  # [B, n, G, R, L, L]
    y = (weights @ u.to(dtype)).float()

    enter, left, carry = cum.exp(), (cum[..., -1:] - cum).exp(), cum[..., -1].exp()
    if starts is not None:
        last = starts[:, :, -1:]
        enter = enter * (starts < 0)[:, :, None, None]
        left = left * (row >= last)[:, :, None, None]
        carry = carry * (last < 0)[..., None]
    ended = (u * left[..., None]).to(dtype).transpose(3, 4).reshape(B, n, G, L, R * P)
    states = (b.transpose(-1, -2) @ ended).float().view(B, n, G, N, R, P)
    first = states.new_zeros(B, 1, G, N, R, P) if state is None else state.view(B, 1, G, N, R, P)
    carry = F.pad(carry, (0, 0, 0, 0, 1, 0))[:, :, :, None, :, None]  # [B, n + 1, G, 1, R, 1]
    states = _prefix(torch.cat([first, states], dim=1), carry)
    before = states[:, :-1].reshape(B, n, G, N, R * P)
    far = (c @ before.to(dtype)).float().view(B, n, G, L, R, P).transpose(3, 4) * enter[..., None]
    y = (y + far).permute(0, 1, 4, 2, 3, 5).reshape(B, n * L, H * P)[:, :S]
    return y, states[:, -1].reshape(B, G, N, R * P)


def _prefix(states: Tensor, carry: Tensor) -> Tensor:
    """s_c = carry_c * s_{c-1} + states_c along axis 1, in log2(n) steps."""
    reach = 1
    while reach < states.shape[1]:
        late = states[:, reach:] + carry[:, reach:] * states[:, :-reach]
        states = torch.cat([states[:, :reach], late], dim=1)
        carry = torch.cat([carry[:, :reach], carry[:, reach:] * carry[:, :-reach]], dim=1)
        reach *= 2
    return states


class _ScanByHand(torch.autograd.Function):
    """The scan on a CPU. Keeps its inputs, its output and the states between chunks."""

    @staticmethod
    def forward(
        ctx: Any, xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, shape: Shape, starts: Tensor | None
    ) -> Tensor:
        y, states = fused.forward(xbc, dt, A, D, shape, starts)
        ctx.save_for_backward(xbc, dt, A, D, starts, y, states)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        xbc, dt, A, D, starts, y, states = ctx.saved_tensors
        return *fused.backward(dy, y, states, xbc, dt, A, D, ctx.shape, starts), None, None
