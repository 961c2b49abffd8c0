"""Compiled graphs, other devices' attention, and the meta device."""

import pytest
import torch
from inkling2_cases import random_ids, random_model

from nybble.models import Inkling2ForCausalLM, presets
from nybble.models.flex import block_mask
from nybble.models.inkling2.attend import attend_chunks
from nybble.models.inkling2.flex import attend_flex


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_decoder_layers_compile_without_a_graph_break() -> None:
    two = {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]}
    plain, compiled = random_model(**two).train(), random_model(**two).train()
    compiled.load_state_dict(plain.state_dict())
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    ids = random_ids(2, 40)
    expected, got = plain(ids, labels=ids).loss, compiled(ids, labels=ids).loss
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 2e-4 * (p.grad.norm() + 1e-3), name
    assert torch.equal(plain.expert_counts(), compiled.expert_counts())
    torch.compiler.reset()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_flex_attention_computes_the_same(window: int | None, packed: bool) -> None:
    B, S, H, h, D, R, extent = 2, 50, 6, 2, 16, 4, 12
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, S, h, D), torch.randn(B, S, h, D)
    rel, proj, sink = torch.randn(B, S, H, R), torch.randn(R, extent), torch.randn(B, S, H)
    segments = torch.tensor([[0] * 13 + [1] * 37, [0] * 40 + [1] * 10]) if packed else None
    mask = block_mask(S, window, segments, B, q.device)
    got = attend_flex(q, k, v, rel, proj, sink, scale=0.25, mask=mask)
    expected = attend_chunks(
        q, k, v, rel, proj, sink, window=window, scale=0.25, query_segments=segments, key_segments=segments
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_attention_op_is_well_behaved() -> None:
    B, S, T, H, h, D, R, extent = 1, 5, 9, 2, 1, 4, 3, 6
    shapes = [(B, S, H, D), (B, T, h, D), (B, T, h, D), (B, S, H, R), (R, extent), (B, S, H)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    keys = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    for segments in ((None, None), (keys[:, -S:], keys)):
        torch.library.opcheck(torch.ops.nybble.relative_attention, (*tensors, *segments, 4, 0.5))


def test_the_real_shape_has_594_billion_parameters() -> None:
    with torch.device("meta"):
        model = Inkling2ForCausalLM(presets.get("inkling-2-small").model_config())
    count = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert experts == 48 * 384 * 3 * 4608 * 2304
    assert round(count / 1e9) == 594
    tables = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" in n or "lm_head" in n)
    assert round((count - tables - experts + experts * 8 // 384) / 1e9) == 17
