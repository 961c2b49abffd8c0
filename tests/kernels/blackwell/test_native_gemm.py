"""Products of codes against products of dequantised values, through an emulation of torch's two functions."""

import pytest
import torch

import nybble
from nybble.errors import NybbleError
from nybble.kernels import blackwell
from nybble.kernels.blackwell import gemm

GROUPS = [0, 1, 7, 33, 128, 129]
FORMATS = ["nvfp4", "nvfp4-4over6", "mxfp8", "mxfp8-floor"]


def ends_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def bare(q: nybble.QTensor) -> torch.Tensor:
    return q.dequantize(torch.float32, apply_outer=False).double()


@pytest.mark.parametrize("format", [*FORMATS, "nvfp4-16x16"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 32), (37, 48, 96), (130, 144, 288), (5, 7, 40), (3, 20, 33)]
)
def test_a_product_of_codes_is_that_of_their_values(format, m, n, k, fake):
    x, w = torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None], torch.randn(n, k)
    outer = "tensor" if format.startswith("nvfp4-16") else "row"
    xq, wq = nybble.quantize(x, format, outer=outer), nybble.quantize(w, format)
    y = blackwell.scaled_linear(xq, wq, torch.float32)
    want = (bare(xq) @ bare(wq).t()).float()
    if xq.spec.two_level:
        want = want * ((xq.tensor_scale[:, None] if outer == "row" else xq.tensor_scale) * wq.tensor_scale)
    assert torch.equal(y, want)
    assert fake.calls == ["scaled_mm"]


@pytest.mark.usefixtures("fake")
def test_the_outer_scale_a_token_is_applied_before_the_output_is_rounded():
    x, w = torch.randn(33, 64), torch.randn(16, 64)
    xq, wq = nybble.quantize(x, "nvfp4", outer="row"), nybble.quantize(w, "nvfp4")
    y32 = blackwell.scaled_linear(xq, wq, torch.float32)
    assert torch.equal(blackwell.scaled_linear(xq, wq, torch.bfloat16), y32.bfloat16())
    assert (y32 - x @ w.t()).norm() < 0.2 * (x @ w.t()).norm()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("sizes", "beyond"), [(GROUPS, 0), (GROUPS[::-1], 9), ([0, 0], 3), ([5], 0)])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (150, 96), (20, 40)])
def test_groups_of_rows(format, sizes, beyond, n, k, fake):
    offs = ends_of(sizes)
    x, w = torch.randn(sum(sizes) + beyond, k), torch.randn(len(sizes), n, k)
    xq, wq = nybble.quantize(x, format, outer="row"), nybble.quantize(w, format, outer="matrix")
    y = blackwell.scaled_grouped(xq, wq, offs, torch.float32)
    want, start = torch.zeros(len(x), n), 0
    for g, end in enumerate(offs.tolist()):
        part = (bare(xq)[start:end] @ bare(wq)[g].t()).bfloat16().float()
        if xq.spec.two_level:
            part = part * xq.tensor_scale[start:end, None] * wq.tensor_scale[g]
        want[start:end], start = part, end
    assert torch.equal(y, want)
    assert fake.calls == ["scaled_grouped_mm"]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("outer", ["tensor", "matrix"])
def test_outer_scales_of_rows_in_groups(outer):
    offs = ends_of([3, 0, 30])
    x, w = torch.randn(33, 32), torch.randn(3, 16, 32)
    x[:3] *= 100
    xq = nybble.quantize(x, "nvfp4", outer=outer, offs=offs if outer == "matrix" else None)
    wq = nybble.quantize(w, "nvfp4", outer="row")
    y = blackwell.scaled_grouped(xq, wq, offs, torch.float32)
    full = torch.cat(
        [xq.dequantize()[:3] @ wq.dequantize()[0].t(), xq.dequantize()[3:] @ wq.dequantize()[2].t()]
    )
    torch.testing.assert_close(y, full, rtol=8e-3, atol=1e-3 * float(full.abs().max()))


@pytest.mark.parametrize(("sizes", "beyond"), [(GROUPS, 0), (GROUPS[::-1], 9), ([0, 0], 3), ([5], 0)])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (150, 20)])
def test_groups_along_tokens(sizes, beyond, n, k, fake):
    offs = ends_of(sizes)
    dy, x = torch.randn(sum(sizes) + beyond, n), torch.randn(sum(sizes) + beyond, k)
    dyq, xq = (nybble.quantize(t, "mxfp8", axis=-2, offs=offs) for t in (dy, x))
    dw = blackwell.scaled_wgrad(dyq, xq, torch.float32)
    want, start = torch.zeros(len(sizes), n, k), 0
    for g, end in enumerate(offs.tolist()):
        want[g], start = (bare(dyq)[start:end].t() @ bare(xq)[start:end]).bfloat16().float(), end
    assert torch.equal(dw, want)
    assert fake.calls == ["scaled_grouped_mm"]


@pytest.mark.usefixtures("fake")
def test_rows_of_no_group_and_empty_experts_are_zero_though_the_kernel_leaves_them_undefined():
    offs = ends_of([0, 2, 0])
    xq = nybble.quantize(torch.randn(5, 32), "mxfp8")
    y = blackwell.scaled_grouped(xq, nybble.quantize(torch.randn(3, 16, 32), "mxfp8"), offs)
    assert y[:2].isfinite().all()
    assert not y[2:].any()
    t = nybble.quantize(torch.randn(5, 32), "mxfp8", axis=-2, offs=offs)
    dw = blackwell.scaled_wgrad(t, t)
    assert dw[1].any()
    assert not dw[[0, 2]].any()


@pytest.mark.usefixtures("fake")
def test_a_block_of_nan_spoils_its_own_row_alone():
    for format in ("nvfp4", "mxfp8"):
        x = torch.randn(20, 64)
        x[3, 5] = torch.inf
        xq, wq = nybble.quantize(x, format, outer="row"), nybble.quantize(torch.randn(16, 64), format)
        bad = blackwell.scaled_linear(xq, wq).isnan()
        assert bad[3].all()
        assert bad.sum() == 16


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (4, 0, 32), (4, 16, 0)])
def test_sizes_of_zero_need_no_kernel(m, n, k, fake):
    x, w = (
        blackwell.coded(*_codes(t), "mxfp8", tuple(t.shape), -1)
        for t in (torch.zeros(m, k), torch.zeros(n, k))
    )
    assert torch.equal(blackwell.product(x, w, torch.float32), torch.zeros(m, n))
    assert fake.calls == []


def _codes(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = nybble.quantize(t, "mxfp8")
    return q.codes, q.scales


@pytest.mark.usefixtures("fake")
def test_codes_at_an_odd_address_are_moved():
    # Kernels load 16 bytes at a time: a view that begins elsewhere must be copied.
    q = nybble.quantize(torch.randn(8, 32), "mxfp8")
    store = torch.empty(8 * 32 + 3, dtype=torch.uint8)
    view = store[3:].view(8, 32).copy_(q.codes)
    x = blackwell.coded(view, q.scales, "mxfp8", (8, 32), -1)
    w = blackwell.coded(q.codes, q.scales, "mxfp8", (8, 32), -1)
    assert torch.equal(blackwell.product(x, w, torch.float32), (bare(q) @ bare(q).t()).float())


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("shape", [(48, 80), (2, 32, 48), (20, 35)])
def test_square_blocks_turned_are_the_same_values(shape):
    w = torch.randn(shape)
    q = nybble.quantize(w, "nvfp4-16x16", outer="matrix" if len(shape) == 3 else "tensor")
    c = blackwell.coded(q.codes, q.scales, q.format, shape, -1).turned()
    other = nybble.quantize(w, "nvfp4-16x16", axis=-2, outer=q.outer)
    want = blackwell.coded(other.codes, other.scales, q.format, shape, -2)
    assert torch.equal(c.codes, want.codes)
    assert torch.equal(c.scales, want.scales)
    assert (c.length, c.format) == (want.length, want.format)
    with pytest.raises(NybbleError, match="one axis only"):
        blackwell.coded(q.codes, q.scales, "nvfp4", shape, -1).turned()


@pytest.mark.usefixtures("fake")
def test_linear_scales_and_scales_of_another_size_are_refused():
    # 128 x 4 scales have the same number of bytes in either order: the type must tell.
    q = nybble.quantize(torch.randn(128, 128), "mxfp8")
    good = blackwell.swizzle(q.scales)
    gemm._dense(q.codes, q.codes, good, good, "mxfp8", torch.float32)
    with pytest.raises(NybbleError, match="scale of a is a Tensor in linear order; swizzle"):
        gemm._dense(q.codes, q.codes, q.scales, good, "mxfp8", torch.float32)
    small = blackwell.swizzle(q.scales[:, :3].repeat(2, 1))
    with pytest.raises(NybbleError, match=r"scale of b holds 256 x 4.*need 128 x 4"):
        gemm._dense(q.codes, q.codes, good, small, "mxfp8", torch.float32)
    offs = torch.tensor([100, 128], dtype=torch.int32)
    stack, two = torch.stack([q.codes, q.codes]), blackwell.swizzle(torch.stack([q.scales, q.scales]))
    with pytest.raises(NybbleError, match=r"scale of a holds 128 x 4.*need 384 x 4"):
        gemm._grouped(q.codes, stack, good, two, "mxfp8", offs)  # of rows without groups
    with pytest.raises(NybbleError, match="scale of b holds 128 x 4"):
        gemm._grouped(q.codes, stack, blackwell.swizzle_row_groups(q.scales, offs), good, "mxfp8", offs)
    with pytest.raises(NybbleError, match=r"scale of a holds 128 x 4.*need 128 x 12"):
        gemm._grouped(q.codes, q.codes, good, good, "mxfp8", offs)


@pytest.mark.usefixtures("fake")
def test_operands_that_do_not_fit_are_refused():
    a, b = (nybble.quantize(torch.randn(16, k), "mxfp8") for k in (64, 32))
    with pytest.raises(NybbleError, match="contract 64 and 32"):
        blackwell.scaled_linear(a, b)
    w = nybble.quantize(torch.randn(3, 16, 64), "mxfp8")
    with pytest.raises(NybbleError, match="2 groups and w has 3"):
        blackwell.scaled_grouped(a, w, torch.tensor([3, 16], dtype=torch.int32))
    with pytest.raises(NybbleError, match="axis -2 with offs"):
        blackwell.scaled_wgrad(a, a)


def test_products_raise_the_reason_on_a_device_that_has_none():
    q = nybble.quantize(torch.randn(16, 32), "nvfp4")
    with pytest.raises(
        NybbleError, match="cannot multiply nvfp4 and nvfp4 natively: cpu is not a CUDA device"
    ):
        blackwell.scaled_linear(q, q)
