"""Fused CPU passes against naive formulas in FP64: values, gradients, NaN, and any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nybble.models.context import Context, same_document
from nybble.models.cpu import conv, router, softmax, swiglu
from nybble.models.inkling2 import chunk
from nybble.models.inkling2.conv import ShortConvolution
from nybble.models.inkling2.experts import SoftcappedSwiGLU
from nybble.models.inkling2.residual import BlockAttentionResidual
from nybble.models.loss import head_loss
from nybble.models.norms import RMSNorm, l2_clip, rms_norm

Function = Callable[..., Tensor]


def _agree(fused: Function, naive: Function, *tensors: Tensor) -> None:
    """Values and gradients: FP32 through the fused pass, FP64 through the naive formula."""
    single = [t.clone().requires_grad_() for t in tensors]
    double = [t.double().requires_grad_() for t in tensors]
    out, expected = fused(*single), naive(*double)
    seed = torch.randn(out.shape)
    out.backward(seed)
    expected.backward(seed.double())
    for got, want in zip(
        [out, *(t.grad for t in single)], [expected, *(t.grad for t in double)], strict=True
    ):
        # a few dozen FP32 roundings
        assert (got - want).norm() <= 3e-6 * want.norm() + 1e-9


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rows", [1, 700])
def test_rms_norm(rows: int) -> None:
    def naive(x: Tensor, w: Tensor | float = 1.0) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    x = torch.randn(rows, 3, 40)
    x[0, 0] = 0.0
    _agree(lambda x, w: rms_norm(x, w, 1e-6), naive, x, torch.rand(40))
    _agree(lambda x: rms_norm(x, None, 1e-6), naive, x[:, 1:])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("limit", [3.0, 6.5, 100.0])
def test_l2_clip(limit: float) -> None:
    def naive(x: Tensor, s: Tensor | float = 1.0, gain: Tensor | float = 1.0) -> Tensor:
        y = x * s
        return y * (limit / (y.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0) * gain

    x, gain = torch.randn(2, 350, 3, 40), torch.rand(350, 1, 1) + 1.0
    _agree(lambda x, s: l2_clip(x, limit, s), naive, x, torch.rand(3, 40) + 0.5)
    _agree(
        lambda x, s: l2_clip(x, limit, s, gain), lambda x, s: naive(x, s, gain), x, torch.rand(3, 40) + 0.5
    )
    _agree(lambda x: l2_clip(x, limit), naive, x)
    assert not l2_clip(torch.zeros(4, 1, 8), limit).any()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_softcapped_swiglu(scale: float) -> None:
    def naive(h: Tensor) -> Tensor:
        g, u = h.chunk(2, dim=-1)
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)

    act = SoftcappedSwiGLU(4.0, 25.0)
    _agree(lambda h: act(*h.chunk(2, dim=-1)), naive, scale * torch.randn(300, 2 * 96))
    _agree(
        lambda g, u: act(g, u),
        lambda g, u: naive(torch.cat([g, u], -1)),
        torch.randn(2, 5, 7),
        torch.randn(2, 5, 7),
    )


def test_swiglu_of_extremes_and_its_weighted_gradient() -> None:
    h = torch.tensor([[-1e30, 1.0], [1e30, 1e30], [-torch.inf, 3.0], [torch.nan, 1.0], [0.0, torch.nan]])
    y = swiglu.forward(h, (4.0, 25.0))[:, 0]
    assert y[:3].abs().tolist() == pytest.approx([0.0, 100.0, 0.0], rel=1e-6, abs=1e-30)
    assert y[3:].isnan().all()
    h, dy, w = torch.randn(9, 8), torch.randn(9, 4), torch.rand(9)
    d, act, dw = swiglu.backward(h, dy, w, (4.0, 25.0))
    plain, value, _ = swiglu.backward(h, dy, None, (4.0, 25.0))
    torch.testing.assert_close(d, plain * w[:, None])
    torch.testing.assert_close(act, value * w[:, None])
    torch.testing.assert_close(dw, (value * dy).sum(-1))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("length", [1, 2, 3, 90])
@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution(length: int, packed: bool) -> None:
    segments = (torch.arange(length) // 3).expand(2, length) if packed else None
    same = () if segments is None else same_document(segments, None, 4)

    def naive(x: Tensor, taps: Tensor) -> Tensor:
        rows = []
        for t in range(length):
            reach = [lag for lag in range(4) if t >= lag and (not packed or (t - lag) // 3 == t // 3)]
            rows.append(torch.stack([x[:, t - lag] * taps[lag] for lag in reach]).sum(0))
        return torch.stack(rows, dim=1)

    from nybble.models.conv import _CausalConv

    _agree(
        lambda x, taps: _CausalConv.apply(x, taps, None, False, *same),
        naive,
        torch.randn(2, length, 20),
        torch.randn(4, 20),
    )
    module = ShortConvolution(20, 4, layer=0, slot=0)
    x = torch.randn(2, length, 20)
    weight = module.conv1d.weight[:, 0]
    if not packed:
        plain = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=20)[..., :length].mT
        torch.testing.assert_close(module(x, Context()), (plain + x) / 5**0.5)

    def together(x: Tensor, residual: Tensor) -> Tensor:
        context = Context(same=same)
        return (
            module(x.float(), context, residual.float()) if x.dtype == torch.float32 else apart(x, residual)
        )

    def apart(x: Tensor, residual: Tensor) -> Tensor:
        taps = (weight.double().flip(-1).T + torch.eye(4, 1)) / 5**0.5
        return naive(x, taps) + residual

    _agree(together, apart, x, torch.randn_like(x))
    module.conv1d.weight.grad = None
    together(x, x).square().sum().backward()
    grad, module.conv1d.weight.grad = module.conv1d.weight.grad, None
    assert grad is not None
    apart(x.double(), x.double()).square().sum().backward()
    torch.testing.assert_close(grad, module.conv1d.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("queries", "count"), [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_attention_residual(queries: int, count: int) -> None:
    module = BlockAttentionResidual(24, queries)

    def mixed(query: Tensor, partial: Tensor, *blocks: Tensor) -> Tensor:
        del module.query
        module.query = query  # type: ignore[assignment]
        return torch.stack(module(blocks, partial, norms, (1,) * queries, torch.float32)[0])

    def naive(query: Tensor, partial: Tensor, *blocks: Tensor) -> Tensor:
        unit = partial / (partial.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        sources = torch.stack([*blocks, unit], dim=-2)
        weights = torch.softmax(sources @ query.view(-1, 24).T / 24**0.5, dim=-2)
        mixed = torch.einsum("bsmh,bsmn->nbsh", sources, weights)
        return mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    norms = tuple(RMSNorm(24, 1e-5) for _ in range(queries))
    query = torch.randn((24,) if queries == 1 else (queries, 24))
    _agree(mixed, naive, query, *(torch.randn(2, 150, 24) for _ in range(count + 1)))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("cap", [30.0, 1e4])
def test_head_loss(cap: float) -> None:
    labels = torch.randint(0, 500, (600,))
    labels[::5] = -100

    def naive(hidden: Tensor, head: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(cap * torch.tanh(hidden @ head.T / cap), labels)

    _agree(
        lambda x, w: head_loss(x, w, labels, cap)[0], naive, 3 * torch.randn(600, 16), torch.randn(500, 16)
    )
    hidden, head = torch.randn(600, 16), torch.randn(500, 16)
    mean, each = head_loss(hidden, head, labels, cap)
    torch.testing.assert_close(mean, each.sum() / (labels >= 0).sum())
    assert not each[::5].any()
    hidden[7] = torch.nan
    hidden[5] = torch.nan  # has no label
    each = head_loss(hidden, head, labels, cap)[1]
    assert each.isnan().nonzero().flatten().tolist() == [7]


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    x, taps, dy = torch.randn(4, 256, 64), torch.randn(4, 64), torch.randn(4, 256, 64)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(conv.backward(dy, x, taps, None, (), False))
    for dx, dtaps, _ in results[1:]:
        assert torch.equal(dx, results[0][0])
        assert torch.equal(dtaps, results[0][1])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("window", "n"), [(100, 5), (7, 7), (1, 3), (20, 31)])
def test_softmax_of_attention(window: int, n: int, packed: bool) -> None:
    B, h, C, G, K = 2, 2, 12, 3, 31
    scores, bias = 3 * torch.randn(B * h, C * G, K), torch.randn(B * h, C * G, n)
    sink, seed = torch.randn(B * h, C * G), torch.randn(B * h, C * G, K)
    keys = (torch.arange(K) // 9).expand(B, K)
    documents = (keys[:, -C:], keys) if packed else None
    results = []
    for module in (softmax, chunk):
        p, d = scores.clone(), seed.clone()
        sunk = module.forward(p, bias, sink, documents, window, G, 0.7)
        results.append([p, sunk, *module.backward(p, sunk, d, n, window, G, 0.7), d])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
    p, sunk = results[0][:2]
    torch.testing.assert_close(p.sum(-1) + sunk, torch.ones_like(sunk))
    assert not p[0, 0, K - C + 1 :].any(), "the first query sees none behind it"
    scores[1, 4, K - C + 1] = torch.nan  # the own key of row 4's query, c = 1
    softmax.forward(scores, bias, sink, documents, window, G, 0.7)
    assert scores.isnan().any(-1).nonzero().tolist() == [[1, 4]]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("k", "E"), [(1, 1), (2, 8), (5, 16)])
def test_routing(k: int, E: int) -> None:
    logits, shift = torch.randn(700, E), 0.1 * torch.randn(E)
    scores, experts, weights = router.choose(logits, shift, k, 2.0)
    wanted = torch.topk(torch.sigmoid(logits) + shift, k, dim=-1)
    torch.testing.assert_close(scores, torch.sigmoid(logits))
    assert torch.equal(experts, wanted.indices)
    exact = logits.double().requires_grad_()
    chosen = torch.sigmoid(exact).gather(1, experts)
    expected = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.0
    torch.testing.assert_close(weights, expected.float())
    seed = torch.randn(700, k)
    expected.backward(seed.double())
    assert exact.grad is not None
    torch.testing.assert_close(
        router.backward(seed, scores, experts, 2.0), exact.grad.float(), atol=1e-6, rtol=1e-5
    )


def test_routing_of_nan_chooses_experts_that_exist() -> None:
    _, experts, _ = router.choose(torch.full((3, 4), torch.nan), torch.zeros(4), 3, 1.0)
    assert all(len({*row}) == 3 and {*row} <= {*range(4)} for row in experts.tolist())
