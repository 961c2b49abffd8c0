"""The attention kernels on a GPU: close to the formula in FP32, and the same bits twice."""

import pytest
import torch

from nybble.models.documents import find_documents
from nybble.models.inkling2.attend import attend_chunks
from nybble.models.inkling2.fused import attend_fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("S", "H", "h", "D", "R", "extent", "window"),
    [
        (1000, 8, 4, 64, 16, 256, 256),
        (1000, 8, 4, 64, 16, 1024, None),
        (700, 6, 2, 32, 16, 128, None),
        (333, 4, 2, 32, 8, 32, 32),
        (520, 6, 1, 64, 16, 300, None),
        (520, 6, 1, 64, 16, 100, 300),
    ],
)
def test_kernels_are_close_to_the_formula_and_repeat(S, H, h, D, R, extent, window, packed):
    torch.manual_seed(0)
    B = 2
    shapes = [(B, S, H, D), (B, S, h, D), (B, S, h, D), (B, S, H, R), (R, extent), (B, S, H)]
    tensors = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().float().requires_grad_() for x in tensors]
    segments = documents = None
    if packed:
        segments = torch.randint(0, 40, (B, 6), device="cuda").repeat_interleave(S // 6 + 1, 1)[:, :S]
        documents = find_documents(segments)
    dout = torch.randn(B, S, H, D, device="cuda").bfloat16()
    expected = attend_chunks(
        *exact, window=window, scale=D**-0.5, query_segments=segments, key_segments=segments
    )
    results = []
    for _ in range(2):
        out = attend_fused(*tensors, window=window, scale=D**-0.5, documents=documents)
        results.append((out.detach(), *torch.autograd.grad(out, tensors, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    wanted = (expected.detach(), *torch.autograd.grad(expected, exact, dout.float()))
    for name, got, want in zip(
        ("out", "q", "k", "v", "rel", "proj", "sink"), results[0], wanted, strict=True
    ):
        assert (got.float() - want).norm() <= 1.5e-2 * want.norm(), name
