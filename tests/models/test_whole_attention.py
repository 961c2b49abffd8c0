"""An attention layer computed as one operation is the layer computed module by module."""

from typing import Any

import numpy as np
import pytest
import torch
from inkling2_cases import randomise, small_config
from torch import Tensor

from nybble.layers import convert, set_step
from nybble.models.context import Context, document_starts, same_document
from nybble.models.cpu import attention as fused
from nybble.models.cpu.heads import Heads, Numbers, Weights, arrays, tokens
from nybble.models.inkling2.attention import Attention

HIDDEN = 32
SLIDING, FULL = 0, 2
"""Layers of `small_config`."""


def _layer(layer: int, **changes: Any) -> Attention:
    module = Attention(small_config(**changes), layer)
    randomise(module)
    return module


def _context(B: int, S: int, kernel: int, packed: bool) -> Context:
    if not packed:
        return Context()
    segments = (torch.arange(S) // 11 + torch.arange(B)[:, None]).contiguous()
    return Context(
        segments=segments,
        same=same_document(segments, None, kernel),
        starts=document_starts(segments, None),
    )


def _run(module: Attention, inputs: list[Tensor], context: Context, seed: Tensor) -> list[Tensor]:
    """The result, then gradients of the inputs and of all parameters."""
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    set_step(module, 3)
    y = module([x for x, n in zip(leaves, module.readers, strict=False) for _ in range(n)], context)
    y.backward(seed)
    return [y.detach(), *(x.grad for x in leaves), *(p.grad.clone() for p in module.parameters())]


def _both(module: Attention, B: int, S: int, packed: bool = False) -> list[tuple[Tensor, Tensor]]:
    """What the whole gives beside what the modules give, which a hook keeps apart."""
    inputs = [torch.randn(B, S, HIDDEN) for _ in range(3)]
    inputs = inputs[: len(module.readers)]
    context, seed = _context(B, S, module.k_proj.sconv.kernel, packed), torch.randn(B, S, HIDDEN)
    whole = _run(module, inputs, context, seed)
    handle = module.sink_proj.register_forward_hook(lambda *_: None)
    apart = _run(module, inputs, context, seed)
    handle.remove()
    return list(zip(whole, apart, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", [SLIDING, FULL])
@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (1, {}),
        (63, {"sliding_window_size": 70, "rel_extent": 5}),
        (150, {"qk_l2_clip_threshold": 1.5, "rel_l2_clip_threshold": 0.7, "d_rel": 5}),
        (130, {"sliding_window_size": 1, "head_dim": 24, "swa_head_dim": 24, "conv_kernel_size": 3}),
        (200, {"sliding_window_size": 67, "num_key_value_heads": 1, "swa_num_key_value_heads": 4}),
    ],
)
def test_whole_and_modules_agree(length: int, changes: dict[str, Any], layer: int, packed: bool) -> None:
    torch.set_num_threads(3)
    for whole, apart in _both(_layer(layer, **changes), 2, length, packed):
        # FP32 roundings of sums in another order
        assert (whole - apart).norm() <= 2e-5 * apart.norm() + 1e-5


@pytest.mark.parametrize("layer", [SLIDING, FULL])
@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
def test_converted_layers_agree(form: str, layer: int) -> None:
    module = _layer(layer)
    rules = [{"modules": "**", "all": form}]
    convert(module, {"name": form, "blocks": {"tails": "allow"}, "rule": rules})
    for whole, apart in _both(module, 2, 70):
        # noise of FP32 tips some operands over to the neighbouring value of 8 or 4 bits of significand
        assert (whole - apart).norm() <= 2e-2 * apart.norm() + 1e-5


def test_the_number_of_threads_changes_no_bit() -> None:
    B, S, H, h, D, R, extent, K = 3, 140, 4, 2, 8, 4, 24, 4
    rows = (H * D, H * D, H * R, H, h * D, 0, h * D, 0)
    made = [torch.randn(n, B * S) for n in rows]
    small = [torch.randn(*shape) for shape in ((H, D), (H, R), (extent, R), (h * D, K), (h * D, K))]
    numbers = Numbers(16, np.float32(0.3), np.float32(2.0), np.float32(1.0), np.float32(1e-5), K)
    given = (
        arrays(Heads, tuple(made)),
        arrays(Weights, tuple(small)),
        tokens(B, S, None, (), None),
        numbers,
    )
    dgated, results = torch.randn(H * D, B * S), []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        out, lse, gated = fused.forward(*given)
        gradients = [torch.zeros(n, B * S) for n in rows]
        dsmall = fused.backward(dgated, *given, out, lse, arrays(Heads, tuple(gradients)))
        results.append((out, lse, gated, *gradients, *dsmall))
    assert all(torch.equal(one, many) for one, many in zip(*results, strict=True))


def test_nan_stays_with_its_sequence() -> None:
    x = torch.randn(2, 80, HIDDEN)
    x[1, 70] = torch.nan
    y = _layer(SLIDING)([x] * 6, Context())
    assert not y[0].isnan().any()
    assert y[1, 70:].isnan().any(-1).all()
