"""Rows times codes against the same product on dequantised values, on any device that runs the kernel."""

import torch

import nybble
from nybble.kernels.cuda.coded_rows import rows_times_codes


def check(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    # experts without rows, with one, with more than a tile; K and N that fill no tile; rows of no expert
    for ends, K, N in (([0, 1, 20, 20, 37], 80, 70), ([3], 16, 5), ([40, 41], 144, 64)):
        E, R = len(ends), ends[-1] + 2
        w = torch.randn(E, N, K, generator=generator)
        w[0, 0, :16] = 0.0
        x = torch.randn(R, K, generator=generator).to(torch.bfloat16)
        q = nybble.quantize(w, "nvfp4", outer="matrix")
        values = q.dequantize(torch.float32, apply_outer=False)
        at = torch.tensor(ends, dtype=torch.int32)
        moved = (t.to(device) for t in (x, q.codes, q.scales, at))
        out = rows_times_codes(*moved).cpu()
        start = 0
        for e, end in enumerate(ends):
            wanted = x[start:end].float() @ values[e].T
            torch.testing.assert_close(out[start:end].float(), wanted, rtol=2**-7, atol=2**-7)
            start = end
