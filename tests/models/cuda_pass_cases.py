"""The GPU passes of models against plain formulas and autograd, on the default device.

As a script it runs them under Triton's interpreter: TRITON_INTERPRET must be set before anything imports
triton.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nybble.models import Inkling2ForCausalLM, presets
from nybble.models.context import document_starts, same_document
from nybble.models.conv import causal_conv
from nybble.models.cuda import blocks as finished
from nybble.models.cuda import conv, conv_dynamic, gate, head, mix, norms, router, tiles
from nybble.models.inkling2 import attention
from nybble.models.inkling2 import residual as residuals
from nybble.models.inkling2.conv import plain_dynamic_convolution, plain_taps
from nybble.models.inkling2.residual import EPS, BlockAttentionResidual, plain_mix
from nybble.models.inkling2.router import _Logits
from nybble.models.loss import plain_rows
from nybble.models.norms import CLIP_EPS, RMSNorm, plain_l2_clip, plain_rms_norm
from nybble.parallel import make_mesh, shard

BF16 = torch.bfloat16


def compare(
    got: Callable[..., tuple[Tensor, ...]], want: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None
) -> None:
    """Both functions' results and gradients; inputs may be BF16, and gradients then are too."""
    results = []
    for function in (got, want):
        leaves = [None if x is None else x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outs = function(*leaves)
        torch.manual_seed(1)
        douts = [torch.randn(y.shape).to(y.dtype) for y in outs]
        taken = [x for x in leaves if x is not None and x.requires_grad]
        results.append((*outs, *torch.autograd.grad(outs, taken, douts)))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a.dtype == b.dtype, i
        coarse = a.dtype == BF16
        # of BF16 one unit in the last place: what lies between two roundings differs in order alone
        torch.testing.assert_close(
            a.float(),
            b.float(),
            rtol=1e-2 if coarse else 2e-5,
            atol=2e-2 if coarse else 5e-5,
            msg=lambda m, i=i: f"{i}: {m}",
        )


def norms_of_rows() -> None:
    x, weight = torch.randn(3, 5, 24), torch.randn(24)
    for w in (weight, None):
        for given, dtype, copies in ((x, torch.float32, 3), (x.to(BF16), BF16, 1)):
            compare(
                lambda x, w, d=dtype, n=copies: norms.RMS.apply(x, w, 1e-5, d, n),
                lambda x, w, d=dtype, n=copies: (plain_rms_norm(x, w, 1e-5).to(d),) * n,
                given,
                w,
            )
    x = torch.randn(2, 9, 3, 10) * torch.tensor([0.1, 3.0]).view(2, 1, 1, 1)
    scale, gain = torch.randn(3, 10), torch.rand(2, 9, 1, 1) + 1
    for s in (scale, None):
        for g in (gain, gain[:1, :1].expand(2, 9, 1, 1), None):
            compare(
                lambda x, s, g=g: (
                    norms.L2Clip.apply(
                        x, s, None if g is None else g.reshape(-1), 2.0, CLIP_EPS, torch.float32
                    ),
                ),
                lambda x, s, g=g: (plain_l2_clip(x, 2.0, s, g),),
                x,
                s,
            )


def mixtures() -> None:
    H = 40
    for n, m, running in ((1, 1, torch.float32), (3, 2, torch.float32), (1, 2, BF16)):
        scales = [torch.randn(H) for _ in range(n)]
        query, last = torch.randn(n, H), torch.randn(2, 14, H).to(running)
        blocks = [torch.randn(2, 14, H).to(running) for _ in range(m)]
        copies = (2, 1, 3)[:n] if running == torch.float32 else (1,)
        layers = 2 if running == torch.float32 else 1  # each rounds the gradient of the running block

        def got(query, last, *rest, n=n, copies=copies, dtype=running, layers=layers):
            whole = [x.detach() for x in rest[n:]]
            stand_ins = [finished.StandIn.apply(x, EPS) for x in rest[n:]]
            ys = ()
            for _ in range(layers):
                some = mix.Mix.apply(
                    EPS, 1e-5, copies, dtype, None, query, last, *rest[:n], *whole, *stand_ins
                )
                last, *stand_ins = some[sum(copies) :]
                ys = (*ys, *some[: sum(copies)])
            return *ys, last

        def want(query, last, *rest, n=n, copies=copies, dtype=running, layers=layers):
            normed = tuple(plain_rms_norm(x, None, EPS) for x in rest[n:])
            mixed = plain_mix(last.float(), query * H**-0.5, normed)
            normed = [plain_rms_norm(y, w, 1e-5) for y, w in zip(mixed, rest[:n], strict=True)]
            times = [y for y, c in zip(normed, copies, strict=True) for _ in range(c)]
            return *(y.to(dtype) for y in times * layers), last

        compare(got, want, query, last, *scales, *blocks)


def finished_blocks() -> None:
    """Gradients of a block that two mixtures read, by all ways on which autograd hands them on."""
    H = 24
    x, w = torch.randn(2, 5, H), torch.randn(2, 5, H)
    mixture, norm = BlockAttentionResidual(H), RMSNorm(H, 1e-5)
    torch.nn.init.normal_(mixture.query)
    leaf = x.clone().requires_grad_()

    def served(*by: bool):
        return patch.object(residuals, "on_gpu", side_effect=chain(by, repeat(by[-1])))

    def mixed(block, hidden, again):
        def both(*blocks):
            return mixture(blocks, hidden, (norm,), (1,), torch.float32)

        return both(block) if again is None else again(both, block, use_reentrant=False)

    def loss(x, again=None, by=(True,), hook=None, hand_on=True):
        with served(*by):
            blocks = (residuals.finished(x),)
            if hook is not None:
                blocks[0].graph.register_hook(hook)
            total = 0.0
            for _ in range(2):
                (y,), _, later = mixed(*blocks, x * 0.5, again)
                blocks = later if hand_on else blocks
                total = total + (y * w).sum()
        return total

    want = torch.autograd.grad(loss(leaf, by=(False,)), (leaf, mixture.query))
    ways = {
        "as it is": {},
        "computed again": {"again": checkpoint},
        "a compiled part first": {"by": (False, True)},
        "a compiled part later": {"by": (True, False)},
        "watched": {"hook": lambda _: None},
    }
    for name, way in ways.items():
        made = loss(leaf, **way)
        for _ in range(1 if "again" in way else 2):
            with served(True):  # what is computed again
                got = torch.autograd.grad(made, (leaf, mixture.query), retain_graph=True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
                )
    torch.testing.assert_close(torch.autograd.grad(loss(x), mixture.query)[0], want[1], rtol=1e-4, atol=1e-5)
    handle = mixture.register_full_backward_hook(lambda *_: None)
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], want[0], rtol=1e-4, atol=1e-5)
    handle.remove()
    for way in ({"hand_on": False}, {"hook": lambda g: g * 1}):
        with pytest.raises(RuntimeError, match="without the terms"):
            torch.autograd.grad(loss(leaf, **way), leaf)

    def let_go(query: Tensor) -> None:
        """What FSDP does to a layer's weights when their gradients are there."""
        query.data.fill_(torch.nan)

    mixture.query.register_post_accumulate_grad_hook(let_go)
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, want[0], rtol=1e-4, atol=1e-5)


def convolutions() -> None:
    B, S, C, K = 2, 9, 12, 4
    x, weight = torch.randn(B, S, C).to(BF16), torch.randn(C, 1, K)
    segments = torch.zeros(B, S, dtype=torch.int64)
    segments[0, 5:], segments[1, 1:], segments[1, 3:] = 1, 1, 2
    for documents in (None, segments):
        same = () if documents is None else same_document(documents, None, K)
        starts = None if documents is None else document_starts(documents, None)
        for residual, dtype, apart in (
            (None, BF16, False),
            (torch.randn(B, S, C), BF16, False),
            (torch.randn(B, S, C), BF16, True),
            (torch.randn(B, S, C).to(BF16), torch.float32, False),
        ):

            def want(x, weight, residual=None, same=same, dtype=dtype):
                y = causal_conv(x.float() + 0, plain_taps(weight), None, None, same)
                return ((y if residual is None else y + residual.float()).to(dtype),)

            def got(x, weight, residual=None, starts=starts, dtype=dtype, apart=apart):
                graph = residual.to(dtype) if apart else None
                value = residual.detach() if apart else residual
                return (conv.ShortConv.apply(x, weight, starts, value, dtype, graph),)

            compare(got, want, x, weight, *([] if residual is None else [residual]))


def dynamic_convolutions() -> None:
    B, S, heads, D, K = 2, 9, 3, 5, 4
    x, static, dynamic = torch.randn(B, S, heads * D), torch.randn(K, heads * D), torch.randn(B, S, heads * K)
    segments = torch.zeros(B, S, dtype=torch.int64)
    segments[0, 5:], segments[1, 1:], segments[1, 3:] = 1, 1, 2
    for documents in (None, segments):
        same = () if documents is None else same_document(documents, None, K)
        starts = None if documents is None else document_starts(documents, None)
        compare(
            lambda *given, starts=starts: (conv_dynamic.DynamicConv.apply(*given, starts),),
            lambda *given, same=same: (plain_dynamic_convolution(*given, None, same),),
            x,
            static,
            dynamic,
        )


def gates() -> None:
    x, g = torch.randn(3, 700).to(BF16), torch.randn(3, 700).to(BF16)
    compare(
        lambda x, g: (gate.Gated.apply(x, g),),
        lambda x, g: ((x.float() * torch.sigmoid(g.float())).to(BF16),),
        x,
        g,
    )


def losses() -> None:
    labels = torch.tensor([0, 4999, -100, 17, 2500])
    for cap in (None, 30.0, 90.0):
        z = torch.randn(5, 5000) * 20
        want = z.clone()
        share = torch.tensor(0.25)
        loss = plain_rows(want, labels, cap, share)
        torch.testing.assert_close(head.rows(z, labels, cap, share, -100), loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(z, want, rtol=1e-4, atol=1e-7)


def routes() -> None:
    T, H, E, k, gain = 37, 80, 6, 3, 2.5
    x, weight, bias = torch.randn(T, H).to(BF16), torch.randn(E, H) * 0.1, torch.randn(E) * 0.1

    def want(x, weight):
        logits = _Logits.apply(x, weight)
        scores = torch.sigmoid(logits)
        experts = torch.topk(scores + bias, k, dim=-1).indices
        assert torch.equal(experts, router.Route.apply(x, weight, bias, k, gain)[2])
        weights = scores.gather(1, experts)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * gain

    def got(x, weight):
        logits, weights, experts = router.Route.apply(x, weight, bias, k, gain)
        assert torch.equal(router.weigh(logits, experts, gain), weights)
        return logits, weights

    compare(got, want, x, weight)


def model_and_text() -> tuple[Inkling2ForCausalLM, Tensor, Tensor]:
    """A model in FP32 with blocks that end within the stack and both kinds of layers; packed documents."""
    config = presets.get("nano").model_config(
        num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        n_layers_per_attn_res_block=2,
        hidden_size=64,
        vocab_size=64,
        unpadded_vocab_size=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = Inkling2ForCausalLM(config).train()
    model.flex = False
    model.compute_dtype = torch.float32
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    ids, segments = torch.randint(64, (1, 7)), torch.zeros(1, 7, dtype=torch.int64)
    segments[0, 4:] = 1
    return model, ids, segments


@contextmanager
def passes(served: bool) -> Iterator[None]:
    """Whether the passes here serve models, also on a CPU."""
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("nybble.") and hasattr(m, "on_gpu")]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "on_gpu", lambda _: served))
        if served:  # and none of the operations that CPUs have for whole layers
            stack.enter_context(patch.object(attention, "unwatched", lambda *_: False))
        yield


def whole_model() -> None:
    """Loss and gradients."""
    model, ids, segments = model_and_text()
    results = []
    for served in (True, False):
        with passes(served):
            loss = model(ids, labels=ids, segments=segments).loss
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
    for name, a, b in zip(["loss", *(n for n, _ in model.named_parameters())], *results, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def sharded_model() -> None:
    """The same bits where FSDP gathers weights layer by layer; they are NaN as soon as it gives them back."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    device = torch.get_default_device().type
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    given_back = _fsdp_param.free_storage

    def free_storage(tensor: Tensor) -> None:
        tensor.untyped_storage().fill_(0xFF)
        given_back(tensor)

    try:
        model, ids, segments = model_and_text()
        results = []
        with (
            passes(True),
            patch.object(_fsdp_param, "free_storage", free_storage),
            warnings.catch_warnings(action="error", category=UserWarning),
        ):
            for sharded in (False, True):
                if sharded:
                    shard(model, make_mesh(device))
                model.zero_grad()
                model(ids, labels=ids, segments=segments).loss.backward()
                grads = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
                results.append({n: getattr(g, "full_tensor", lambda g=g: g)().clone() for n, g in grads})
        alone, gathered = results
        assert alone.keys() == gathered.keys()
        assert [name for name in alone if not torch.equal(alone[name], gathered[name])] == []
    finally:
        dist.destroy_process_group()


CHECKS = (
    norms_of_rows,
    mixtures,
    finished_blocks,
    convolutions,
    dynamic_convolutions,
    gates,
    losses,
    routes,
    whole_model,
    sharded_model,
)


def run(check: Callable[[], None]) -> None:
    """One of the checks, with so few programs that each has several tiles of tokens to go through."""
    torch.manual_seed(0)
    with (
        patch.object(conv, "PARTS", 3),
        patch.object(tiles, "PARTS", 9),
        patch.object(norms, "HEAD_PARTS", 9),
        patch.multiple(mix, FEW=9, MANY=9),
        patch.object(finished, "MOST", 3),
    ):
        check()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in CHECKS:
        run(check)
