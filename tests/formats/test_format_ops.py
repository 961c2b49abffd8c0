"""The ops as torch sees them: schemas, fake kernels, meta tensors and full-graph compilation."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nybble
from nybble.formats import get, names, ops

KEY = torch.tensor([1, 2, 3])
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def cases():
    for format, axis, outer, grouped in itertools.product(
        names(), (-1, -2), ("tensor", "row", "matrix"), (False, True)
    ):
        fmt = get(format)
        if fmt.square and (grouped or outer == "row"):
            continue
        if grouped and axis == -2 and format == "fp8-row":
            continue
        yield format, axis, outer, OFFS if grouped else None


def same_layout(real, fake):
    real, fake = (t if isinstance(t, tuple) else (t,) for t in (real, fake))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("format", "axis", "outer", "offs"), list(cases()))
def test_meta_tensors_get_the_shapes_of_real_ones(format, axis, outer, offs):
    for shape in [(5, 37), (5, 64)] if offs is not None else [(5, 37), (3, 18, 33), (0, 16), (16, 0)]:
        args = [torch.ones(shape), format, axis, "nearest", outer, None, 0, 0, None, offs]
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        q = ops.quantize(*args)
        same_layout(q, ops.quantize(*meta))
        tail = [format, axis, shape, torch.bfloat16, outer, True, offs]
        fake_tail = [*tail[:-1], meta[-1]]
        same_layout(ops.dequantize(*q, *tail), ops.dequantize(*(t.to("meta") for t in q), *fake_tail))
        args.insert(2, torch.float32)
        meta.insert(2, torch.float32)
        same_layout(ops.fake_quantize(*args), ops.fake_quantize(*meta))


CHECKED = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-16x16-4over6", "mxfp8", "fp8-row", "bf16"])
def test_opcheck(format):
    rounding, key = ("nearest", None) if format == "bf16" else ("stochastic", KEY)
    x = torch.randn(6, 40)
    torch.library.opcheck(ops.quantize, (x, format, -1, rounding, "tensor", key, 1, 2), test_utils=CHECKED)
    torch.library.opcheck(ops.fake_quantize, (x, format, torch.bfloat16, -2), test_utils=CHECKED)
    q = ops.quantize(x, format)
    torch.library.opcheck(ops.dequantize, (*q, format, -1, [6, 40], torch.bfloat16), test_utils=CHECKED)
    again = (*q, format, -1, "tensor", [6, 40], "mxfp8", -2)
    torch.library.opcheck(ops.requantize, (*again, "stochastic", "tensor", KEY), test_utils=CHECKED)
    torch.library.opcheck(ops.fake_requantize, (*again, torch.float32), test_utils=CHECKED)


def test_opcheck_with_groups_and_rows():
    x, rows = torch.randn(6, 40), torch.arange(6).flip(0)
    for axis in (-1, -2):
        args = ("mxfp8", axis, "stochastic", "matrix", KEY, 1, 2, rows, OFFS)
        torch.library.opcheck(ops.quantize, (x, *args), test_utils=CHECKED)


def test_fake_tensors_pass_through_the_python_face():
    with FakeTensorMode():
        q = nybble.quantize(torch.empty(8, 48), "nvfp4", outer="row")
        r = q.requantize("mxfp8", axis=0, rounding="stochastic", key=nybble.key(1))
        assert (q.codes.shape, q.scales.shape, q.amax.shape) == ((8, 24), (8, 3), (8,))
        assert (r.codes.shape, r.scales.shape) == ((48, 8), (48, 1))
        assert r.dequantize().shape == (8, 48)


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantize_compiles_into_one_graph(dynamic):
    def work(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = nybble.quantize(x, "nvfp4", outer="row")
        r = q.requantize("mxfp8", axis=0, rounding="stochastic", key=nybble.key(1, 2))
        return q.codes, q.tensor_scale, r.dequantize(torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in [(33, 40), (17, 48)]:
        x = torch.randn(shape)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), work(x), strict=True))


def test_a_new_step_does_not_compile_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def work(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.ops.nybble.fake_quantize(x, "mxfp8", torch.float32, -1, "stochastic", "tensor", key)[0]

    compiled = torch.compile(work, fullgraph=True, backend=counter)
    x = torch.full((4, 64), 1.1)
    results = [compiled(x, nybble.key(1, step).tensor()) for step in range(3)]
    assert counter.frame_count == 1
    assert not torch.equal(results[0], results[1])
    assert all(torch.equal(r, work(x, nybble.key(1, s).tensor())) for s, r in enumerate(results))
