"""Cross entropy of logits, soft-capped or not, and its gradient: each row is read twice and written once.

The second read finds the row in the cache of the GPU, so that the logits come from memory once.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
SMALL_CAP = 40.0
"""Up to this cap a softmax needs no maximum taken off."""


@triton.jit
def _squashed(z_ptr, at, mask, cap, CAPPED: tl.constexpr):
    """(tanh(z / cap), the logit); without a cap both are z. -inf outside of the row."""
    z = tl.load(z_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if CAPPED:
        # 1 - 2 / (e^2u + 1) errs by 6e-8, against logits of the size of the cap
        z = 1.0 - 2.0 / (tl.exp(z * (2.0 / cap)) + 1.0)
        return z, tl.where(mask, z * cap, float("-inf"))
    return z, z


@triton.jit
def loss_rows(
    z_ptr, label_ptr, share_ptr, nll_ptr, cap, ignore, V: tl.constexpr,
    CAPPED: tl.constexpr, SMALL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * V
    label = tl.load(label_ptr + row)
    keep = label != ignore
    aim = tl.where(keep, label, 0)
    own = tl.load(z_ptr + aim).to(tl.float32)
    if CAPPED:
        own = (1.0 - 2.0 / (tl.exp(own * (2.0 / cap)) + 1.0)) * cap
    largest = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        _, logit = _squashed(z_ptr, at, at < V, cap, CAPPED)
        if SMALL:  # no logit exceeds the cap, and e^(2 cap) is a float
            total += tl.exp(logit - cap)
        else:
            higher = tl.maximum(largest, logit)
            # a lane that has seen no finite logit has nothing to scale
            scaled = tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - higher))
            total = scaled + tl.where(logit == float("-inf"), 0.0, tl.exp(logit - higher))
            largest = higher
    top = cap
    if not SMALL:
        top = tl.max(largest, 0)
        total = tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top))
    lse = tl.log(tl.sum(total, 0)) + top
    tl.store(nll_ptr + row, tl.where(keep, lse - own, 0.0))
    share = tl.where(keep, tl.load(share_ptr), 0.0)
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        z, logit = _squashed(z_ptr, at, at < V, cap, CAPPED)
        d = (tl.exp(logit - lse) - tl.where(at == aim, 1.0, 0.0)) * share
        if CAPPED:
            d = d * (1.0 - z * z)
        tl.store(z_ptr + at, d.to(z_ptr.dtype.element_ty), mask=at < V)


def rows(z: Tensor, labels: Tensor, cap: float | None, share: Tensor, ignore: int) -> Tensor:
    """Loss FP32 [n] of z [n, V] before its cap, if any; z becomes share * d loss / d z, in its dtype."""
    nll = torch.empty(z.shape[0], dtype=torch.float32, device=z.device)
    if z.numel():
        loss_rows[(z.shape[0],)](
            z, labels, share, nll, 1.0 if cap is None else cap, ignore, z.shape[1],
            cap is not None, cap is not None and cap <= SMALL_CAP, BLOCK,
            num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return nll
