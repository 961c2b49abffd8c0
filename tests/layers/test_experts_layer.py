"""Experts: exact against the model's own in FP32, bit for bit the specified composition when quantised."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nybble.formats import get, reference
from nybble.formats.outer import decode_scale
from nybble.layers import Experts, convert, refresh, set_step

SEED, STEP, MICRO = 3, 11, 1
E, H, WIDTH, K = 4, 64, 32, 2
FORWARD = {"format": "mxfp8", "rounding": "stochastic", "source": "forward"}
INKLING = {
    "rule": [{"modules": "**", "kind": "experts", "fprop": "nvfp4", "dgrad": {"dy": "mxfp8", "w": FORWARD},
              "wgrad": {"dy": "mxfp8", "x": FORWARD}}]
}  # fmt: skip
STOCHASTIC = {
    "rule": [{"modules": "**", "fprop": {"x": {"format": "nvfp4", "rounding": "stochastic"}},
              "dgrad": {"dy": {"format": "mxfp8", "rounding": "stochastic"}, "w": FORWARD},
              "wgrad": {"dy": {"format": "mxfp8", "rounding": "stochastic"}, "x": FORWARD}}]
}  # fmt: skip


def _qwen():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E))


def _inkling_config():
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

    return Inkling2TextConfig(hidden_size=H, moe_intermediate_size=WIDTH, n_routed_experts=E)


def _inkling():
    from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts

    return Inkling2Experts(_inkling_config())


def _ours():
    from nybble.models.inkling2.experts import Experts as Ours

    return Ours(_inkling_config())


def _nemotron():
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    return NemotronHExperts(NemotronHConfig(hidden_size=H, moe_intermediate_size=WIDTH, n_routed_experts=E))


class Gelu(nn.Module):
    """Experts whose activation Nybble has no derivative for."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * WIDTH, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, WIDTH))
        self.act_fn = nn.GELU()

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(index == e)
            gate, up = (x[token] @ self.gate_up_proj[e].t()).chunk(2, -1)
            y = (self.act_fn(gate) * up) @ self.down_proj[e].t()
            out = out.index_add(0, token, y * weights[token, choice, None])
        return out


MAKERS = {"qwen": _qwen, "inkling": _inkling, "ours": _ours, "nemotron": _nemotron, "gelu": Gelu}


def experts(recipe=INKLING, maker="ours", keep="recompute"):
    torch.manual_seed(0)
    module = MAKERS[maker]()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.2)
    if recipe is None:
        return module
    model = nn.ModuleList([module])
    convert(model, {**recipe, "experts": {"keep": keep}})
    set_step(model, STEP, MICRO, seed=SEED)
    return model[0]


def inputs(T=37, k=K, index=None):
    g = torch.Generator().manual_seed(T)
    if index is None:
        index = (
            torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(T)])
            if T
            else torch.zeros(0, k).long()
        )
    x = torch.randn(T, H, generator=g).requires_grad_()
    w = torch.rand(T, k, generator=g).requires_grad_()
    return x, index, w, torch.randn(T, H, generator=g)


def step(module, x, index, w, dy, **kwargs):
    """Output and all gradients of one pass."""
    for t in (x, w, *module.parameters()):
        t.grad = None
    y = module(x, index, w, **kwargs)
    y.backward(dy)
    return [y.detach(), *(None if t.grad is None else t.grad.clone() for t in (x, w, *module.parameters()))]


def equal(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("keep", ["recompute", "activations"])
@pytest.mark.parametrize("maker", MAKERS)
def test_in_fp32_it_is_the_models_own_layer(maker, keep):
    """Output and every gradient, that of the routing weights (taken without the experts' outputs)
    included."""
    plain = {"rule": [{"modules": "**", "all": "fp32"}]}
    args = inputs()
    own, ours = step(experts(None, maker), *args), step(experts(plain, maker, keep), *args)
    for a, b in zip(ours, own, strict=True):
        # only the order of FP32 additions differs
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def _values(t, format, axis, outer="tensor", **kwargs):
    q = reference.quantize(t.detach(), format, axis, outer=outer, **kwargs)
    return reference.dequantize(*q, format, axis, t.shape, torch.float32, outer, apply_outer=False), q


def test_fprop_is_the_specified_composition():
    """Tokens quantised before they are sorted, products per expert, outer scales and routing weight in one
    factor."""
    module, (x, index, w, _) = experts(), inputs()
    nvfp4 = get("nvfp4")
    vx, qx = _values(x, "nvfp4", -1, "row")
    up, qup = _values(module.gate_up_proj, "nvfp4", -1, "matrix")
    down, qdown = _values(module.down_proj, "nvfp4", -1, "matrix")
    sx, sup, sdown = (decode_scale(nvfp4, q[2]) for q in (qx, qup, qdown))
    expected = torch.zeros_like(x)
    pairs = {}
    for e in range(E):
        token, choice = torch.where(index == e)
        gate_up = (vx[token] @ up[e].t()) * (sx[token] * sup[e])[:, None]
        h = module.act_fn(*gate_up.chunk(2, -1))
        vh, qh = _values(h, "nvfp4", -1, "row")
        factor = w[token, choice] * (decode_scale(nvfp4, qh[2]) * sdown[e])
        out = vh @ down[e].t()
        for row, (t, c) in enumerate(zip(token.tolist(), choice.tolist(), strict=True)):
            pairs[t, c] = factor[row], out[row]
    for c in range(K):
        for t in range(len(x)):
            expected[t] = torch.addcmul(expected[t], pairs[t, c][1], pairs[t, c][0])
    assert torch.equal(module(x, index, w), expected)


def test_wgrad_blocks_do_not_span_experts():
    """Each expert's weight gradient is that of its own tokens alone, padded groups and draws included."""
    module, (x, index, w, dy) = experts(), inputs(T=75)
    together = step(module, x, index, w, dy)
    for e in range(E):
        hit = (index == e).any(-1)
        rows = torch.where(hit)[0]
        part = (x.detach()[hit].requires_grad_(), index[hit], w.detach()[hit].requires_grad_(), dy[hit])
        alone = step(module, *part, rows=rows)
        for a, b in zip(alone[3:], together[3:], strict=True):
            # the sums over tokens have the same terms; a smaller product may add them in another order
            torch.testing.assert_close(a[e], b[e], rtol=1e-4, atol=1e-5 * float(b[e].abs().max()))


@pytest.mark.parametrize("recipe", [INKLING, STOCHASTIC], ids=["inkling", "all-stochastic"])
def test_draws_follow_tokens_not_their_order(recipe):
    """`rows` names the tokens: in another order, or on another rank, each gets the same output."""
    module, (x, index, w, dy) = experts(recipe), inputs()
    y, dx, dw = step(module, x, index, w, dy)[:3]
    mixed = torch.randperm(len(x))
    args = (x.detach()[mixed].requires_grad_(), index[mixed], w.detach()[mixed].requires_grad_(), dy[mixed])
    y2, dx2, dw2 = step(module, *args, rows=mixed)[:3]
    for a, b in ((y2, y), (dx2, dx), (dw2, dw)):
        torch.testing.assert_close(a, b[mixed], rtol=1e-5, atol=1e-6)  # order of accumulation


def test_refreshed_weights_of_a_part_of_the_experts_are_drawn_as_in_the_whole():
    module, batch = experts(), inputs()
    whole = step(module, *batch)
    module.first_expert = 3
    set_step(module, STEP + 1)
    set_step(module, STEP)
    part = step(module, *batch)
    set_step(module, STEP)
    refresh(module)
    assert all(cache.kept.keys() == {"fprop", "dgrad"} for cache in module.weight_caches)
    assert equal(step(module, *batch), part)
    assert not equal(part, whole)


@pytest.mark.parametrize("recipe", [INKLING, STOCHASTIC, {"rule": [{"modules": "**", "all": "bf16"}]}])
def test_recomputing_gives_the_same_bits_as_keeping(recipe):
    args = inputs()
    kept, again = (step(experts(recipe, keep=keep), *args) for keep in ("activations", "recompute"))
    assert equal(kept, again)


def test_activation_checkpointing_gives_the_same_bits():
    module, args = experts(STOCHASTIC), inputs()
    plain = step(module, *args)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, *a):
            return checkpoint(self.inner, *a, use_reentrant=False)

    assert equal(step(Checkpointed(), *args), plain)


@pytest.mark.parametrize("maker", ["ours", "qwen"])
@pytest.mark.parametrize(
    ("T", "index"),
    [
        (0, None),
        (1, None),
        (33, torch.full((33, 1), 2)),
        (41, torch.tensor([[1, 3]]).expand(41, 2)),
        (7, torch.tensor([[0], [0], [3], [0], [0], [0], [0]])),
    ],
    ids=["no-token", "one-token", "all-to-one", "two-empty", "group-of-one"],
)
def test_any_distribution_over_experts(maker, T, index):
    k = K if index is None else index.shape[1]
    args = inputs(T, k, index)
    out = step(experts(maker=maker), *args)
    assert all(torch.isfinite(t).all() for t in out)
    if T == 0:
        assert not any(t.any() for t in out)
        return
    exact = step(experts(None, maker), *args)
    empty = [e for e in range(E) if not (args[1] == e).any()]
    for a, b in zip(out, exact, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 0.35 * b.norm()
    for grad in out[3:]:
        assert not grad[empty].any()


def test_an_index_beyond_the_experts_adds_nothing():
    """Expert parallelism marks pairs of other ranks with index E."""
    module, (x, index, w, dy) = experts(), inputs()
    away = index.clone()
    away[:, 1] = E
    y, dx, dw, *_ = step(module, x, away, w, dy)
    y1, dx1, *_ = step(module, x, index[:, :1], w.detach()[:, :1].requires_grad_(), dy)
    torch.testing.assert_close(y, y1)
    torch.testing.assert_close(dx, dx1, rtol=1e-2, atol=1e-2)  # draws name the pair, and k differs
    assert not dw[:, 1].any()
    assert torch.isfinite(dw).all()


def test_a_tokens_output_does_not_depend_on_its_batch():
    module, (x, index, w, _) = experts(), inputs()
    with torch.no_grad():
        y = module(x, index, w)
        loud = x.clone()
        loud[5] *= 1e4
        other = module(loud, index, w)
    same = torch.arange(len(x)) != 5
    assert torch.equal(y[same], other[same])


def test_a_nan_reaches_its_token_alone():
    module, (x, index, w, _) = experts(), inputs()
    with torch.no_grad():
        x[3, 0] = torch.nan
        bad = torch.isnan(module(x, index, w)).any(-1)
    assert bad.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both", "x", "weights"])
def test_what_needs_no_gradient_gets_none_and_changes_nothing_else(frozen, quantise_calls):
    module, (x, index, w, dy) = experts(), inputs()
    full = step(module, x, index, w, dy)
    calls = quantise_calls(lambda: step(module, x, index, w, dy))
    names = {"both": ["gate_up_proj", "down_proj"], "x": [], "weights": []}.get(frozen, [frozen])
    for name in names:
        getattr(module, name).requires_grad_(False)
    x = x.detach() if frozen == "x" else x
    w = w.detach() if frozen == "weights" else w
    part = step(module, x, index, w, dy)
    for a, b in zip(part, full, strict=True):
        assert a is None or torch.equal(a, b)
    assert sum(a is None for a in part) == max(1, len(names))
    assert frozen == "weights" or sum(quantise_calls(lambda: step(module, x, index, w, dy)).values()) < sum(
        calls.values()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_come_back(dtype):
    module, (x, index, w, dy) = experts(), inputs()
    exact = step(module, x, index, w, dy)
    args = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, w, dy)]
    low = step(module, args[0], index, args[1], args[2])
    assert [t.dtype for t in low] == [dtype] * 3 + [torch.float32] * 2
    for a, b in zip(low, exact, strict=True):
        assert (a.float() - b).norm() < 0.2 * b.norm()


def test_an_expanded_gradient_equals_its_copy():
    module, (x, index, w, _) = experts(), inputs()
    dy = torch.randn(1, H).expand(len(x), H)
    assert equal(step(module, x, index, w, dy), step(module, x, index, w, dy.contiguous()))


def test_only_codes_and_routing_are_kept(saved_tensors):
    """Codes of the T tokens and of the R rows of h; neither gate_up, nor a copy of x a row, nor an expert's
    output."""
    module, (x, index, w, _) = experts(), inputs(T=512)
    _, kept = saved_tensors(lambda: module(x, index, w))
    R = 512 * K
    parameters = {p.data_ptr() for p in module.parameters()}
    total = sum(t.nbytes for t in kept if t.data_ptr() not in parameters and t.dtype != torch.int64)
    codes = 512 * (H * 4.5 / 8 + 4) + R * (WIDTH * 4.5 / 8 + 4)
    assert total == codes + 4 * R + 4 * R + 4 * E  # order and routing weights of the rows, ends of the groups


def test_two_products_never_share_a_draw():
    module, (x, index, w, dy) = experts(), inputs()
    assert isinstance(module, Experts)
    roles = [spec.role + n for spec in module.specs for n in range(6)]
    assert len(set(roles)) == 12
    first = step(module, x, index, w, dy)
    set_step(module, STEP + 1)
    assert not torch.equal(step(module, x, index, w, dy)[1], first[1])
