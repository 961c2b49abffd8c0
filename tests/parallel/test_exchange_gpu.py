"""The exchange on GPUs, with NCCL: one rank gives the results of no exchange, two those of one process."""

import datetime

import layer_cases
import pytest
import ranks as processes
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nybble.layers import convert as convert_alone
from nybble.layers import set_step
from nybble.parallel.convert import _share_out
from nybble.parallel.wire import Monitor
from nybble.recipes import LEGS, Traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, WIDTH = 256, 128


@pytest.fixture
def ranks(tmp_path):
    torch.cuda.set_device(0)
    store, limit = dist.FileStore(str(tmp_path / "store"), 1), datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=limit)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("legs", [{}, {"dispatch": "nvfp4"}, dict.fromkeys(LEGS, "mxfp8")])
def test_a_layer_with_an_exchange_is_the_layer(ranks, legs, monkeypatch):
    monkeypatch.setattr(layer_cases, "H", HIDDEN)
    monkeypatch.setattr(layer_cases, "WIDTH", WIDTH)
    arguments = [t.cuda() for t in layer_cases.batch()]
    x, index, weights, dy = (t.bfloat16() if t.is_floating_point() else t for t in arguments)
    results, monitor = [], Monitor()
    for exchanged in (False, True):
        model = layer_cases.Model().cuda()
        report = convert_alone(model, layer_cases.recipe(legs))
        if exchanged:
            _share_out(model.experts, report.resolved.row("experts"), ranks, Traffic(**legs), monitor)
        set_step(model, 7, seed=11)
        inputs = x.clone().requires_grad_()
        y = model.experts(inputs, index, weights)
        y.backward(dy)
        grad = model.experts.down_proj.grad
        results.append((y, inputs.grad, grad if not exchanged else grad.to_local()))
    limit = 0.0 if "combine" not in legs else 0.2
    for alone, shared in zip(*results, strict=True):
        assert (alone.float() - shared.float()).norm() <= limit * alone.float().norm()
    _, waited = monitor.meter.take()
    assert all(seconds >= 0 for seconds in waited.values())
    assert monitor.watch.position()[2] is False


CASES = {
    "bf16": ({}, "spread", None),
    "mxfp8": (dict.fromkeys(LEGS, "mxfp8"), "spread", None),
    "nvfp4 dispatch": ({"dispatch": "nvfp4"}, "spread", None),
    "all to the first rank": ({}, "first", None),
    "all to one expert": ({}, "one", None),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does():
    """Legs of 16 bits lose nothing of BF16 activations: equal operands, stochastic rounding included."""
    results = processes.run(2, layer_cases.all_cases_on_gpus, CASES, HIDDEN, WIDTH)
    for rank, found in enumerate(results):
        for case in ("bf16", "nvfp4 dispatch", "all to the first rank", "all to one expert"):
            assert found[case]["operands"] == [True] * 7, (rank, case)
            # Sums of a token's experts, of up to 30, are rounded to BF16 once a rank.
            assert found[case]["y"] <= 0.25, (rank, case)
        assert found["mxfp8"]["y"] > found["bf16"]["y"]
        for leg in LEGS:
            assert found["mxfp8"]["bytes"][leg] <= 0.52 * found["bf16"]["bytes"][leg]
    assert [found["all to the first rank"]["rows"] for found in results] == [layer_cases.T, 0]
