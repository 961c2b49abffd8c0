"""Runs the batch-invariant kernels under Triton's interpreter on small inputs; fails by an assertion.

A script, because TRITON_INTERPRET must be set before anything imports triton.
"""

import torch

from nybble.kernels.cuda import invariant
from nybble.models.cpu import exact


def products() -> None:
    a, b = torch.randn(37, 70), torch.randn(70, 65)
    whole = invariant.matmul(a, b, torch.float32)
    torch.testing.assert_close(whole, a @ b, atol=1e-4, rtol=1e-5)
    # The interpreter multiplies tiles by a BLAS, whose bits follow a row's place in its tile. Those of tensor
    # cores do not (`test_invariant_gpu.py`), but here rows must keep their place.
    for rows in (1, 20, 33):
        assert torch.equal(invariant.matmul(a[:rows], b, torch.float32), whole[:rows])
    assert torch.equal(invariant.matmul(a, b.T.contiguous().T, torch.float32), whole)


def grouped_products() -> None:
    a, w = torch.randn(45, 33), torch.randn(4, 33, 20)
    offs = torch.tensor([3, 3, 38, 41], dtype=torch.int32)
    out = invariant.grouped_matmul(a, w, offs)
    start = 0
    for e, end in enumerate(offs.tolist()):
        assert torch.equal(out[start:end], invariant.matmul(a[start:end], w[e], torch.float32))
        start = end
    assert (out[start:] == 0).all()


def attention() -> None:
    B, S, T, H, h, D, R, extent = 2, 2, 39, 2, 1, 8, 3, 20
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, T, h, D), torch.randn(B, T, h, D)
    rel, proj, sink = torch.randn(B, S, H, R), torch.randn(R, extent), torch.randn(B, S, H)
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[0, 5:], documents[1, 37:] = 1, 2
    for window in (None, 11):
        for keys in (None, documents):
            queries = None if keys is None else keys[:, T - S :]
            arguments = (q, k, v, rel, proj, sink, queries, keys, window, D**-0.5)
            out = invariant.attend(*arguments)
            torch.testing.assert_close(out, exact.attend(*arguments), atol=2e-6, rtol=1e-5)
            last = (q[:, -1:], k, v, rel[:, -1:], proj, sink[:, -1:])
            ends = (None if queries is None else queries[:, -1:], keys, window, D**-0.5)
            assert torch.equal(invariant.attend(*last, *ends), out[:, -1:])
    # what lies before a document does not matter
    alone = tuple(x[:1] for x in (q, k[:, 5:], v[:, 5:], rel)), (proj, sink[:1], None, None, None, D**-0.5)
    packed = (*(x[:1] for x in (q, k, v, rel)), proj, sink[:1], documents[:1, T - S :], documents[:1])
    assert torch.equal(invariant.attend(*alone[0], *alone[1]), invariant.attend(*packed, None, D**-0.5))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    products()
    grouped_products()
    attention()
