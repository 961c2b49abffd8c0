"""BF16 products of experts on Hopper by the kernel of this project."""

import pytest
import torch

from nybble.kernels import hopper, streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or hopper.can_run("cuda") is not None
        or hopper.own_reason() is not None,
        reason="needs a Hopper GPU and a Triton with which the kernel was compiled",
    ),
]
SIZES = (0, 1, 7, 33, 128, 1000, 64, 65, 700, 0)


def operands(N, C, transpose, sizes=SIZES):
    """Small integers, every sum of which is exact; rows of no expert are NaN."""
    gen = torch.Generator().manual_seed(0)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = int(ends[-1])
    a = torch.randint(-3, 4, (rows + 9, C), generator=gen).bfloat16()
    a[rows:] = torch.nan
    shape = (len(sizes), N, C) if transpose else (len(sizes), C, N)
    return a, torch.randint(-3, 4, shape, generator=gen).bfloat16(), ends


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("N", "C"), [(8, 64), (136, 128), (448, 512), (512, 448), (896, 512), (2056, 320)])
def test_exact_sums_equal_the_plain_product(N, C, transpose):
    from nybble.kernels.cuda import launch_bf16

    a, w, ends = operands(N, C, transpose)
    got = launch_bf16.product_of_rows(a.cuda(), w.cuda(), ends.cuda(), transpose).cpu()
    start = 0
    for e, end in enumerate(ends.tolist()):
        want = a[start:end].float() @ (w[e].float().T if transpose else w[e].float())
        assert torch.equal(got[start:end], want.bfloat16()), e
        start = end


def test_the_kernel_serves_what_it_is_for_and_torch_the_rest():
    a, w, ends = operands(896, 512, True)
    assert streamed._fits(torch.device("cuda"), len(a), len(w), 896, 512)
    assert not streamed._fits(torch.device("cuda"), len(a), len(w), 896, 504)
    for narrow in (0, 8):
        x, m = a[:, narrow:].contiguous().cuda(), w[..., narrow:].contiguous().cuda()
        got = streamed.rows_times(x, m, ends.cuda(), True)[: ends[-1]]
        want = torch.nn.functional.grouped_mm(x, m.transpose(-2, -1), offs=ends.cuda())[: ends[-1]]
        assert torch.equal(got, want)


def test_two_hundred_repeats_beside_other_work():
    from nybble.kernels.cuda import launch_bf16

    _, w, ends = operands(896, 512, True)
    a = torch.randn(2000, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(w.shape, device="cuda", dtype=torch.bfloat16)
    busy, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    wanted = None
    for _ in range(200):
        with torch.cuda.stream(beside):
            busy = (busy @ busy).clamp(-1, 1)
        got = launch_bf16.product_of_rows(a, w, ends.cuda(), True)[: int(ends[-1])]
        wanted = got if wanted is None else wanted
        assert torch.equal(got, wanted)
    torch.cuda.synchronize()
