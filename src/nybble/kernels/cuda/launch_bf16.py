"""Launches of `bf16_rows.py`: grids, and descriptors of what the TMA engine moves."""

import torch
from torch import Tensor

from nybble.kernels.cuda import bf16_rows
from nybble.kernels.cuda.jit import cdiv, multiprocessors
from nybble.kernels.cuda.launch_fp8 import BN, REGISTERS, WARPS, ending_rows, plain
from nybble.kernels.cuda.launch_rows import pow2

SHARED = 227 * 1024 - 1024
"""Bytes of shared memory of a program, but for barriers."""
CK, HALF = bf16_rows.CK.value, bf16_rows.HALF.value


def product_of_rows(a: Tensor, w: Tensor, offs: Tensor, transpose: bool) -> Tensor:
    """Each group's rows of BF16 [R, C], which end at offs (int32 [E]), times its matrix.

    w is [E, N, C] with `transpose`, else [E, C, N]; C is a multiple of 64 up to 512 (shared
    memory holds 128 outputs of them) and N one of 8.
    Returns BF16 [R, N]; rows at or beyond offs[-1] hold anything.
    """
    (R, C), E = a.shape, w.shape[0]
    N = w.shape[1] if transpose else w.shape[2]
    out = torch.empty(R, N, dtype=torch.bfloat16, device=a.device)
    across = cdiv(N, BN)
    w = w.contiguous()
    bf16_rows.product_of_rows[(across * _spans(R, across, a.device),)](
        plain(a.contiguous(), HALF, CK),
        plain(w.view(E * N, C), BN, CK) if transpose else plain(w.view(E * C, N), CK, BN),
        offs,
        ending_rows(out),
        N,
        C,
        E,
        TRANSPOSE=transpose,
        STEPS=C // CK,
        G=pow2(E),
        STAGES=_stages(C // CK),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )
    return out


def _stages(steps: int) -> int:
    """Buffers of a ring: as many as there is room for beside the matrix and what waits to be stored."""
    matrix, stored, stage = (2 * n for n in (steps * BN * CK, 2 * HALF * BN, 2 * HALF * CK))
    return min(8, (SHARED - matrix - stored) // stage)


def _spans(rows: int, across: int, device: torch.device) -> int:
    """Programs that share out the rows, of as many as fit on the GPU at once."""
    return max(1, min(multiprocessors(device) // across, cdiv(rows, 2 * HALF)))
