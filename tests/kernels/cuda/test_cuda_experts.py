"""The passes over the rows of experts, and whole layers, on a GPU."""

import expert_cases
import pytest
import torch
from cuda_cases import hostile, moved, requantized, same, stochastic
from torch import nn

from nybble.kernels import direct, fused, hopper, weight_codes
from nybble.layers import convert, set_step
from nybble.models.inkling2.experts import SoftcappedSwiGLU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def agree(calls):
    for op, args in calls:
        want = expert_cases.results(fused.SPECIFICATIONS[op], op, args)
        on_gpu = tuple(
            [moved(b, "cuda") for b in a] if isinstance(a, list) else moved(a, "cuda") for a in args
        )
        assert expert_cases.wrong(expert_cases.results(fused, op, on_gpu), want, op) == [], op


@pytest.mark.parametrize(("T", "k", "width"), [(70, 2, 64), (513, 1, 2048), (1, 3, 32), (600, 4, 448)])
@pytest.mark.parametrize("part", range(4))
def test_passes_equal_their_specification(part, T, k, width):
    agree(expert_cases.calls(T=T, k=k, E=8, width=width)[part::4])


def test_gradients_in_codes_of_rows_that_no_program_holds():
    calls = expert_cases.calls(T=40, k=2, E=3, width=4112)
    agree([(op, args) for op, args in calls if op == "swiglu_backward_fp8"])


@pytest.mark.parametrize("matrices", [3, 32])
def test_columns_of_matrices_equal_the_reference(matrices):
    """Few matrices take two kernels, many one whose programs hold whole columns."""
    w = hostile(matrices * 100, 264).view(matrices, 100, 264)
    call = requantized(w, "nvfp4", "matrix", "fp8-row", stochastic())
    assert call.wrong(direct, "cuda") == []


def test_codes_and_values_of_a_weight_equal_the_reference():
    w = hostile(300, 264, torch.float32).view(3, 100, 264)
    arguments = ("nvfp4", "nearest", "matrix")
    want = weight_codes.codes_and_values(w, *arguments)
    got = fused.codes_and_values(w.cuda(), *arguments)
    assert all(same(g.cpu(), t) for g, t in zip(got, want, strict=True))


class Experts(nn.Module):
    """Fused experts in transformers' form."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(1)) * 0.2
        )
        self.down_proj = nn.Parameter(
            torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(2)) * 0.2
        )
        self.act_fn = SoftcappedSwiGLU(4.0, 25.0)


def run(recipe, device, keep="recompute"):
    net = nn.Sequential(Experts()).to(device)
    convert(net, {**recipe, "experts": {"keep": keep}})
    set_step(net, 3, seed=5)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=gen).bfloat16().to(device).requires_grad_()
    index = torch.randint(5, (300, 2), generator=gen).to(device)
    w = torch.rand(300, 2, generator=gen).to(device).requires_grad_()
    dy = torch.randn(300, 64, generator=gen).bfloat16().to(device)
    y = net[0](x, index, w)
    y.backward(dy)
    return [t.float().cpu() for t in (y.detach(), x.grad, w.grad, *(p.grad for p in net.parameters()))]


FORWARD = {"rounding": "stochastic", "source": "forward"}


def recipe(backward):
    return {
        "rule": [
            {
                "modules": "**",
                "kind": "experts",
                "fprop": "nvfp4",
                "dgrad": {"dy": backward, "w": {"format": backward, **FORWARD}},
                "wgrad": {"dy": backward, "x": {"format": backward, **FORWARD}},
            }
        ]
    }


@pytest.mark.parametrize("backward", ["mxfp8", "fp8-row"])
def test_a_layer_agrees_with_the_cpu(backward):
    """Products round to BF16 on a GPU, which moves some values of h over a rounding boundary."""
    for a, b in zip(run(recipe(backward), "cuda"), run(recipe(backward), "cpu"), strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("backward", ["mxfp8", "fp8-row", "bf16"])
def test_recomputing_gives_the_same_bits_as_keeping(backward):
    plan = {"rule": [{"modules": "**", "all": "bf16"}]} if backward == "bf16" else recipe(backward)
    for a, b in zip(run(plan, "cuda"), run(plan, "cuda", "activations"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(
    not torch.cuda.is_available() or hopper.can_run("cuda") is not None, reason="needs Hopper's FP8 products"
)
def test_fp8_products_are_those_of_the_decoded_operands():
    r = expert_cases.routing(700, 1, 6)
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(700, n, generator=gen).cuda().bfloat16() for n in (96, 64))
    ends = r["ends"].cuda()
    nearest = ("nearest", None, 0, 0, None, ends)
    _, tile_ends = fused.token_tiles(ends, 700)
    held = [hopper.row_scaled(*fused.fp8_columns(t, *nearest), tile_ends) for t in (a, b)]
    got = hopper.product_of_groups(*held).float()
    start = 0
    for g, end in enumerate(ends.tolist()):
        want = a[start:end].float().T @ b[start:end].float()
        assert (got[g] - want).norm() <= 0.06 * want.norm() + 1e-6, g
        start = end
    w = torch.randn(6, 48, 96, generator=gen).cuda().bfloat16()
    from nybble.formats import ops

    x8, w8 = (hopper.row_scaled(*ops.quantize(t, "fp8-row")[:2]) for t in (a, w))
    got = hopper.product_of_rows(x8, w8, ends).float()
    start = 0
    for g, end in enumerate(ends.tolist()):
        want = a[start:end].float() @ w[g].float().T
        assert (got[start:end] - want).norm() <= 0.06 * want.norm() + 1e-6, g
        start = end
