"""Linear: its GEMMs are exactly a composition of the specification's quantisers and matrix products."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nybble.formats import e4m3, get, reference
from nybble.formats.outer import decode_scale
from nybble.layers import convert, set_step
from nybble.layers import step as step_module

SEED, STEP, MICRO = 5, 7, 2
STOCHASTIC = {"format": "mxfp8", "rounding": "stochastic"}
FORWARD = {"format": "mxfp8", "rounding": "stochastic", "source": "forward"}
NVFP4 = {
    "rule": [{"modules": "**", "fprop": "nvfp4", "dgrad": {"dy": STOCHASTIC, "w": FORWARD},
              "wgrad": {"dy": STOCHASTIC, "x": FORWARD}}]
}  # fmt: skip
TWO_LEVELS = {"rule": [{"modules": "**", "all": "nvfp4"}]}


def layer(recipe, K=64, N=96, bias=False, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(K, N, bias=bias, dtype=dtype))
    convert(model, recipe)
    set_step(model, STEP, MICRO, seed=SEED)
    return model[0]


def key(micro):
    return torch.tensor([SEED, STEP, micro])


def test_fprop_is_the_specified_composition():
    """y = (values of x along K @ values of W along K) * (scale of the token * scale of W), bit for bit."""
    lin, x = layer(NVFP4), torch.randn(33, 64)
    qx = reference.quantize(x, "nvfp4", -1, outer="row")
    qw = reference.quantize(lin.weight, "nvfp4", -1, outer="matrix")
    vx = reference.dequantize(*qx, "nvfp4", -1, x.shape, torch.float32, "row", apply_outer=False)
    vw = reference.dequantize(*qw, "nvfp4", -1, lin.weight.shape, torch.float32, "matrix", apply_outer=False)
    scale = decode_scale(get("nvfp4"), qx[2]) * decode_scale(get("nvfp4"), qw[2])
    assert torch.equal(lin(x), (vx @ vw.t()) * scale[:, None])


def test_backward_is_the_specified_composition():
    """Forward tensors are re-rounded from their NVFP4 value; weights draw with micro-batch 0, the rest with
    theirs."""
    lin = layer(NVFP4)
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96)
    lin(x).backward(dy)
    cpu = torch.float32
    qx = reference.quantize(x, "nvfp4", -1, outer="row")
    qw = reference.quantize(lin.weight, "nvfp4", -1, outer="matrix")
    args = ("mxfp8", -2, cpu, "stochastic", "tensor")
    w, _ = reference.fake_requantize(*qw, "nvfp4", -1, "matrix", lin.weight.shape, *args, key(0), 0, 3)
    xt, _ = reference.fake_requantize(*qx, "nvfp4", -1, "row", x.shape, *args, key(MICRO), 0, 5)
    d, _ = reference.fake_quantize(dy, "mxfp8", cpu, -1, "stochastic", "tensor", key(MICRO), 0, 2)
    dt, _ = reference.fake_quantize(dy, "mxfp8", cpu, -2, "stochastic", "tensor", key(MICRO), 0, 4)
    assert torch.equal(x.grad, d @ w)
    assert torch.equal(lin.weight.grad, dt.t() @ xt)


@pytest.mark.parametrize("source", ["forward", "original"])
def test_scales_of_dys_rows_go_into_x_where_wgrad_takes_the_codes_of_dgrad(source):
    """A row of zeros, whose scale says nothing, does not widen the scales of x."""
    row = {"format": "fp8-row", "rounding": "stochastic", "source": source}
    rule = {"modules": "**", "fprop": "nvfp4", "dgrad": "fp8-row"}
    lin = layer({"rule": [{**rule, "wgrad": {"dy": {"format": "fp8-row", "source": "dgrad"}, "x": row}}]})
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96) * 1e-4
    dy[3] = 0
    lin(x).backward(dy)
    codes, scales, _ = reference.quantize(dy, "fp8-row", -1)
    factor = scales.clone()
    factor[3] = 0
    if source == "forward":
        q = reference.quantize(x, "nvfp4", -1, outer="row")
        full = reference.dequantize(*q, "nvfp4", -1, x.shape, torch.float32, "row", apply_outer=False)
        scaled = full * (decode_scale(get("nvfp4"), q[2])[:, None] * factor)
    else:  # waits in 16 bits
        scaled = (x.detach().bfloat16().float() * factor).bfloat16()
    args = ("fp8-row", torch.float32, -2, "stochastic", "tensor", key(MICRO), 0, 5)
    xt, _ = reference.fake_quantize(scaled, *args)
    w = reference.fake_quantize(lin.weight, "fp8-row", torch.float32, -2)[0]
    assert torch.equal(lin.weight.grad, e4m3.decode(codes).t() @ xt)
    assert torch.equal(x.grad, (e4m3.decode(codes) * scales) @ w)
    assert (lin.weight.grad - dy.t() @ x.detach()).norm() < 0.15 * lin.weight.grad.norm()


def test_scales_of_small_gradients_do_not_underflow_in_fp16():
    fp8 = {"dy": {"format": "fp8-row", "source": "dgrad"}, "x": "fp8-row"}
    lin = layer({"rule": [{"modules": "**", "dgrad": "fp8-row", "wgrad": fp8}]})
    x, dy = torch.randn(40, 64).half().requires_grad_(), (torch.randn(40, 96) * 1e-5).half()
    lin(x).backward(dy)
    exact = dy.float().t() @ x.detach().float()
    assert (lin.weight.grad - exact).norm() < 0.1 * exact.norm()


def test_outer_scales_of_gradients_go_into_the_epilogue():
    """All six operands in NVFP4: the result equals that of fully dequantised operands to FP32 rounding."""
    lin = layer(TWO_LEVELS)
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96) * 1e-4
    y = lin(x)
    y.backward(dy)

    def full(t, axis, outer):
        q = reference.quantize(t.detach(), "nvfp4", axis, outer=outer)
        return reference.dequantize(*q, "nvfp4", axis, t.shape, torch.float32, outer)

    w = lin.weight
    torch.testing.assert_close(y, full(x, -1, "row") @ full(w, -1, "matrix").t())
    torch.testing.assert_close(x.grad, full(dy, -1, "row") @ full(w, -2, "matrix"))
    waited = x.bfloat16()  # an original waits for the backward pass in 16 bits
    torch.testing.assert_close(w.grad, full(dy, -2, "matrix").t() @ full(waited, -2, "matrix"))


def test_bf16_rounds_operands_and_accumulates_in_fp32():
    lin, x = layer("bf16"), torch.randn(8, 64)
    assert torch.equal(lin(x), x.bfloat16().float() @ lin.weight.bfloat16().float().t())


def test_only_the_codes_of_x_are_kept(saved_tensors):
    """4.5 bits a value and one outer amax a token, where BF16 keeps 16 bits."""
    lin, x = layer(NVFP4, K=256), torch.randn(512, 256, requires_grad=True)
    _, kept = saved_tensors(lambda: lin(x))
    sizes = [t.nbytes for t in kept if t.data_ptr() != lin.weight.data_ptr() and t.dtype != torch.int64]
    assert sum(sizes) == 512 * 256 * 4.5 / 8 + 512 * 4


def test_an_original_operand_is_kept_in_16_bits(saved_tensors):
    lin, x = layer("mxfp8", K=256), torch.randn(512, 256, requires_grad=True)
    _, kept = saved_tensors(lambda: lin(x))
    assert [t.dtype for t in kept if t.shape == x.shape] == [torch.bfloat16]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
def test_a_frozen_weight_keeps_nothing_and_gets_no_gradient(recipe, saved_tensors, quantise_calls):
    lin, x = layer(recipe), torch.randn(32, 64, requires_grad=True)
    full = quantise_calls(lambda: lin(x).sum().backward())
    lin.weight.requires_grad_(False)
    lin.weight.grad = None
    _, kept = saved_tensors(lambda: lin(x))
    assert not [t for t in kept if t.dtype != torch.int64 and t.shape != lin.weight.shape]
    fewer = quantise_calls(lambda: lin(x).sum().backward())
    assert lin.weight.grad is None
    assert x.grad is not None
    assert recipe == "bf16" or sum(fewer.values()) < sum(full.values())


def test_an_input_without_gradient_needs_no_dgrad():
    lin = layer(NVFP4)
    lin(torch.randn(32, 64)).sum().backward()
    assert lin.weight.grad is not None


def test_no_grad_gives_the_same_output():
    lin, x = layer(NVFP4), torch.randn(32, 64, requires_grad=True)
    with torch.no_grad():
        quiet = lin(x)
    assert torch.equal(quiet, lin(x))
    assert not quiet.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_input_dtype_is_returned(dtype):
    lin, x = layer(NVFP4, bias=True), torch.randn(16, 64).to(dtype).requires_grad_()
    y = lin(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert lin.weight.grad.dtype == lin.bias.grad.dtype == torch.float32
    exact = lin(x.detach().float())
    torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=1e-3)  # one rounding to 8 bits


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (3, 5, 64), (64,)], ids=str)
def test_any_number_of_tokens(shape):
    lin, x = layer(NVFP4, bias=True), torch.randn(shape, requires_grad=True)
    y = lin(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 96)
    assert x.grad.shape == x.shape
    assert torch.isfinite(lin.weight.grad).all()
    if x.numel() == 0:
        assert not lin.weight.grad.any()


def test_tails_of_an_allowed_recipe():
    recipe = {**NVFP4, "blocks": {"tails": "allow"}}
    lin, x = layer(recipe, K=50, N=37), torch.randn(11, 50, requires_grad=True)
    lin(x).sum().backward()
    exact = torch.ones(11, 37) @ lin.weight.detach()
    assert (x.grad - exact).norm() < 0.2 * exact.norm()


def test_expanded_and_non_contiguous_tensors_equal_their_copies():
    lin = layer(NVFP4)
    x = torch.randn(64, 32).t().requires_grad_()
    for dy in (torch.ones(1, 1).expand(32, 96), torch.randn(96, 32).t()):
        grads = []
        for inp, out in ((x, dy), (x.detach().contiguous().requires_grad_(), dy.contiguous())):
            inp.grad = lin.weight.grad = None
            lin(inp).backward(out)
            grads.append((inp.grad, lin.weight.grad))
        assert torch.equal(grads[0][0], grads[1][0])
        assert torch.equal(grads[0][1], grads[1][1])


def test_the_bias_gradient_is_the_sum_of_dy():
    lin, dy = layer("mxfp8", bias=True), torch.randn(10, 96)
    lin(torch.randn(10, 64)).backward(dy)
    torch.testing.assert_close(lin.bias.grad, dy.sum(0))


def test_draws_repeat_within_a_key_and_change_with_step_micro_and_seed():
    lin, x, dy = layer(NVFP4), torch.randn(32, 64), torch.randn(32, 96)

    def grad(step, micro, seed):
        set_step(lin, step, micro, seed)
        lin.weight.grad = None
        lin(x).backward(dy)
        return lin.weight.grad

    first = grad(3, 0, 1)
    assert torch.equal(first, grad(3, 0, 1))
    for other in ((4, 0, 1), (3, 1, 1), (3, 0, 2)):
        assert not torch.equal(first, grad(*other))


@pytest.mark.parametrize("recipe", [NVFP4, {"rule": [{"modules": "**", "all": "bf16"}]}])
def test_the_backward_pass_draws_from_the_key_of_its_forward_pass(recipe):
    """Two micro-batches may be in flight, as in a pipeline: the later forward must not change the earlier
    backward, nor make it fail where nothing is drawn."""
    lin, x, dy = layer(recipe), torch.randn(32, 64), torch.randn(32, 96)
    lin(x).backward(dy)
    alone, lin.weight.grad = lin.weight.grad, None
    y = lin(x)
    set_step(lin, STEP, MICRO + 1)
    y.backward(dy)
    assert torch.equal(lin.weight.grad, alone)


def test_keys_of_a_cuda_graph_change_in_place_but_not_those_of_other_passes(monkeypatch):
    state, cpu = step_module.StepState(), torch.device("cpu")
    before = state.keys(cpu)
    state.set(1, 1)
    monkeypatch.setattr(step_module, "_capturing", lambda _: True)
    captured = state.keys(cpu)
    monkeypatch.setattr(step_module, "_capturing", lambda _: False)
    beside = state.keys(cpu)
    state.set(5, 2, seed=9)
    assert [key.tolist() for key in captured] == [[9, 5, 2, 0], [9, 5, 0, 0]]
    assert [key.tolist() for key in beside] == [[0, 1, 1, 0], [0, 1, 0, 0]]
    assert [key.tolist() for key in before] == [[0] * 4, [0] * 4]


def test_a_key_that_a_sampler_was_first_to_need_serves_training():
    lin = layer(NVFP4)
    lin.step_state._keys.clear()
    with torch.inference_mode():
        set_step(lin, STEP + 1)
        lin(torch.randn(32, 64))
    lin(torch.randn(32, 64)).sum().backward()


def test_activation_checkpointing_gives_the_same_bits():
    lin, dy = layer(NVFP4), torch.randn(32, 96)
    grads = []
    for run in (lin, lambda x: checkpoint(lin, x, use_reentrant=False)):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        lin.weight.grad = None
        run(x).backward(dy)
        grads.append((x.grad, lin.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_a_tokens_output_does_not_depend_on_its_batch():
    lin, x = layer(NVFP4), torch.randn(64, 64)
    x[5] *= 1000
    alone = torch.cat([lin(row[None].expand(64, -1))[:1] for row in x[:4]])
    torch.testing.assert_close(lin(x)[:4], alone, rtol=1e-6, atol=1e-6)  # order of accumulation


def test_a_nan_reaches_the_output_of_its_token_alone():
    lin, x = layer(NVFP4), torch.randn(4, 64)
    x[2, 7] = torch.nan
    assert torch.isnan(lin(x)).any(-1).tolist() == [False, False, True, False]


def test_a_copy_has_its_own_step():
    lin = layer(NVFP4)
    twin = copy.deepcopy(lin)
    x = torch.randn(32, 64)
    set_step(lin, STEP + 1)
    assert twin.step_state.step == STEP
    assert torch.equal(twin(x), lin(x))
    with torch.no_grad():
        lin.weight.mul_(2)
    assert not torch.equal(twin(x), lin(x))


def test_square_blocks_serve_both_passes_with_one_quantised_weight():
    dgrad = {"dy": "bf16", "w": {"format": "nvfp4-16x16", "source": "forward"}}
    rule = {"modules": "**", "fprop": {"x": "nvfp4", "w": "nvfp4-16x16"}, "dgrad": dgrad}
    lin, dy = layer({"rule": [rule]}), torch.randn(32, 96).bfloat16().float()
    x = torch.zeros(32, 64, requires_grad=True)
    lin(x).backward(dy)
    q = reference.quantize(lin.weight, "nvfp4-16x16", -1, outer="matrix")
    w = reference.dequantize(*q, "nvfp4-16x16", -1, lin.weight.shape, torch.float32, "matrix")
    torch.testing.assert_close(x.grad, dy @ w)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dgrad", ["mxfp8", {"dy": "fp32", "w": "mxfp8"}], ids=["mxfp8", "fp32-dy"])
def test_operands_of_both_axes_from_one_read_are_those_of_two(dgrad, monkeypatch):
    """On a GPU a gradient, and a weight, that MXFP8 takes along both axes are read once."""
    x, dy = (torch.randn(200, n, device="cuda", dtype=torch.bfloat16) for n in (64, 96))

    def grads():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96, bias=False)).cuda()
        convert(model, {"rule": [{"modules": "**", "fprop": "mxfp8", "dgrad": dgrad, "wgrad": "mxfp8"}]})
        set_step(model, STEP, MICRO, seed=SEED)
        a = x.clone().requires_grad_()
        y = model(a)
        y.backward(dy)
        return y, a.grad, model[0].weight.grad

    once = grads()
    for module in ("linear", "weights"):
        monkeypatch.setattr(f"nybble.layers.{module}.one_read", lambda *_: False)
    assert all(torch.equal(a, b) for a, b in zip(once, grads(), strict=True))
