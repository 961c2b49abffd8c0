"""Runs the attention kernels under Triton's interpreter against `attend_chunks`; fails by an assertion.

A script, because TRITON_INTERPRET must be set before anything imports triton.
"""

from typing import Any

import torch
from triton.runtime import interpreter

from nybble.models.cuda import attend
from nybble.models.documents import find_documents
from nybble.models.inkling2.attend import attend_chunks
from nybble.models.inkling2.fused import attend_fused

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """NumPy 2.4 makes no int of an array of one element, which Triton 3.6 asks for at the ends of loops."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch

# B, S, H, h, D, R, extent, window, documents, tile
CASES = {
    "sliding, grouped": (1, 37, 4, 2, 32, 4, 20, 20, False, 16),
    "full, tiles beyond the bias": (1, 50, 3, 1, 32, 16, 9, None, False, 16),
    "documents, bias over all": (2, 35, 2, 2, 32, 3, 100, None, True, 16),
    "documents, window beyond the bias": (2, 50, 1, 1, 32, 4, 17, 33, True, 16),
    "window of one": (1, 17, 1, 1, 32, 4, 9, 1, False, 16),
    "heads of 64": (1, 35, 1, 1, 64, 4, 40, None, False, 32),
}


def check(B, S, H, h, D, R, extent, window, packed, T) -> None:
    shapes = [(B, S, H, D), (B, S, h, D), (B, S, h, D), (B, S, H, R), (R, extent), (B, S, H)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    segments = None
    if packed:
        # the last row comes back to its first document
        segments = torch.tensor([[0] * 7 + [5] * (S - 7), [3] * 20 + [-1] * (S - 22) + [3] * 2])
    expected = attend_chunks(
        *tensors, window=window, scale=0.3, query_segments=segments, key_segments=segments
    )
    dout = torch.randn(B, S, D, H).transpose(2, 3)
    grads = torch.autograd.grad(expected, tensors, dout)
    # as slices of one product, and the heads of keys apart
    q, k, v, rel, proj, sink = (x.detach() for x in tensors)
    q, rel = torch.cat([q, rel], -1).split([D, R], -1)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    documents = None if segments is None else find_documents(segments)
    tile = attend.Tile(T, 4, 2)
    out, lse = attend.forward(q, k, v, rel, proj, sink, documents, window, 0.3, tile)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)
    got = attend.backward(dout, out, lse, q, k, v, rel, proj, sink, documents, window, 0.3, tile, tile)
    for name, g, e in zip(("q", "k", "v", "rel", "proj", "sink"), got, grads, strict=True):
        torch.testing.assert_close(g, e, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def check_op() -> None:
    """What autograd and the compiler see."""
    shapes = [(1, 20, 2, 32), (1, 20, 1, 32), (1, 20, 1, 32), (1, 20, 2, 4), (4, 9), (1, 20, 2)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    segments = torch.tensor([[0] * 13 + [1] * 7])
    documents = find_documents(segments)
    named = {"window": 12, "scale": 0.2}
    out = attend_fused(*tensors, documents=documents, **named)
    expected = attend_chunks(*tensors, query_segments=segments, key_segments=segments, **named)
    dout = torch.randn_like(out)
    grads = (torch.autograd.grad(x, tensors, dout) for x in (out, expected))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    parts = documents.segments, documents.first, documents.last
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.nybble.fused_relative_attention, (*tensors, *parts, 12, 0.2), test_utils=tests
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for case, sizes in CASES.items():
        print(case, flush=True)
        check(*sizes)
    print("op", flush=True)
    check_op()
