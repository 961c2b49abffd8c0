"""Bits of the Triton kernels on a GPU against the reference on the CPU."""

import pytest
import torch
from cuda_cases import (
    AT_A_WORD,
    KEY,
    ROWS_OFFS,
    Call,
    blocks_of_scales,
    eden_cases,
    hostile,
    requantized,
    same,
    stochastic,
    transform_cases,
)

from nybble.formats import hadamard, ops, reference, table
from nybble.kernels import can_run, messages
from nybble.kernels.cuda import launch_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKED = [n for n in table.names() if not table.get(n).passthrough]
DTYPES = [torch.bfloat16, torch.float32]
OFFS = torch.tensor(ROWS_OFFS, dtype=torch.int32)
LONG_OFFS = torch.tensor([0, 5, 230, 230, 500], dtype=torch.int32)


def outers(name: str) -> tuple[str, ...]:
    fmt = table.get(name)
    if not fmt.two_level:
        return ("tensor",)
    return ("tensor", "matrix") if fmt.square else ("tensor", "row", "matrix")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", BLOCKED)
def test_codes_and_values_equal_the_reference(name, axis):
    x = hostile(200, 264)
    for outer in outers(name):
        for rounding in ({}, stochastic()):
            named = {"outer": outer, **rounding}
            assert Call(op="quantize", args=(x, name, axis), named=named).wrong(ops, "cuda") == [], named
            call = Call(op="fake_quantize", args=(x, name, torch.bfloat16, axis), named=named)
            assert call.wrong(ops, "cuda") == [], named


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", BLOCKED)
def test_fp32_inputs(name, axis):
    x = hostile(200, 264, torch.float32)
    assert Call(op="quantize", args=(x, name, axis), named=stochastic()).wrong(ops, "cuda") == []
    assert Call(op="fake_quantize", args=(x, name, torch.float32, axis)).wrong(ops, "cuda") == []


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8-1x128", "nvfp4-16x16"])
def test_shapes_that_fill_no_block(name, axis):
    for shape in ((70, 100), (3, 5, 33), (2, 64, 96), (65,), (1, 8), (9, 16), (0, 16), (16, 0)):
        if -axis > len(shape):
            continue
        x = (
            hostile(torch.Size(shape[:-1]).numel(), shape[-1]).reshape(shape)
            if 0 not in shape
            else torch.zeros(shape)
        )
        for outer in outers(name):
            for rounding in ({}, stochastic()):
                call = Call(op="quantize", args=(x, name, axis), named={"outer": outer, **rounding})
                assert call.wrong(ops, "cuda") == [], (shape, outer, rounding)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8-1x128", "fp8-row"])
def test_token_groups_and_moved_rows(name, axis):
    if table.get(name).block_cols is None and axis == -2:
        pytest.skip("has no grouped layout along the tokens")
    rows = torch.randperm(1000)[:70]
    x = hostile(70, 96)
    for offs in (OFFS, torch.tensor([70], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)):
        for outer in outers(name):
            named = {"outer": outer, "offs": offs}
            call = Call(op="quantize", args=(x, name, axis), named={**named, **stochastic(rows=rows)})
            assert call.wrong(ops, "cuda") == [], (offs, outer)
            call = Call(op="fake_quantize", args=(x, name, torch.bfloat16, axis), named=named)
            assert call.wrong(ops, "cuda") == [], (offs, outer)


@pytest.mark.parametrize("to", ["mxfp8", "mxfp8-floor", "mxfp4", "fp8-1x128", "nvfp4"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-4over6", "nvfp4-16x16", "mxfp8"])
def test_codes_are_re_rounded_along_the_other_axis(name, to):
    for x in (hostile(70, 72), hostile(96, 40, torch.float32).view(2, 48, 40)):
        for outer in outers(name):
            assert requantized(x, name, outer, to, stochastic()).wrong(ops, "cuda") == []
        assert requantized(x, name, "tensor", to, {}).wrong(ops, "cuda") == []
        assert requantized(x, name, "tensor", to, stochastic(), dtype=torch.bfloat16).wrong(ops, "cuda") == []
    if name == "nvfp4":
        rows = torch.randperm(1000)[:70]
        call = requantized(hostile(70, 72), name, "row", to, stochastic(rows=rows), offs=OFFS)
        assert call.wrong(ops, "cuda") == []


@pytest.mark.parametrize("offs", [None, LONG_OFFS], ids=["rows", "groups"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["codes", "values"])
def test_codes_of_any_size_are_re_rounded_along_the_other_axis(dtype, offs):
    x = blocks_of_scales(512, 264)
    named = {} if dtype is None else {"dtype": dtype}
    for rounding in (stochastic(), stochastic(key=AT_A_WORD), stochastic(rows=torch.randperm(512)), {}):
        assert requantized(x, "nvfp4", "row", "mxfp8", rounding, offs=offs, **named).wrong(ops, "cuda") == []


@pytest.mark.parametrize("name", BLOCKED)
def test_codes_decode_to_the_reference(name):
    for shape in ((70, 72), (2, 48, 40), (33, 31)):
        for axis in (-1, -2):
            for outer in outers(name):
                x = hostile(torch.Size(shape[:-1]).numel(), shape[-1]).reshape(shape)
                parts = reference.quantize(x, name, axis, outer=outer)
                for dtype, apply in ((torch.bfloat16, False), (torch.float32, True), (torch.float16, True)):
                    args = (*parts, name, axis, list(shape), dtype, outer, apply)
                    assert Call(op="dequantize", args=args).wrong(ops, "cuda") == []


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_both_axes_from_one_read_equal_two_calls(dtype):
    for shape in ((200, 264), (70, 72)):
        x = hostile(*shape, dtype).cuda()
        for offs in (None, OFFS.cuda()):
            for kind in ({}, {"rounding": "stochastic", "key": KEY.cuda(), "layer": 2}):
                got = launch_both.fake_quantize_both(
                    x, "mxfp8", torch.bfloat16, offs=offs, operand_rows=2, operand_columns=4, **kind
                )
                for g, axis, operand in zip(got, (-1, -2), (2, 4), strict=True):
                    want, _ = reference.fake_quantize(
                        x, "mxfp8", torch.bfloat16, axis, offs=offs, operand=operand, **kind
                    )
                    assert same(g, want)


def test_any_layout_of_the_input():
    x = hostile(96, 128)
    for name, axis in (("nvfp4", -1), ("mxfp8", -1), ("mxfp8", -2)):
        want = {k: reference.quantize(v, name, axis) for k, v in layouts(x).items()}
        for k, v in layouts(x.cuda()).items():
            got = ops.quantize(v, name, axis)
            assert all(same(g.cpu(), w) for g, w in zip(got, want[k], strict=True)), (name, axis, k)


def layouts(x):
    return {
        "transposed": x.t(),
        "expanded row": x[7:8].expand(64, 128),
        "expanded scalar": x[8, 9].expand(40, 64),
        "every other column": x[:, ::2],
        "odd start": x.flatten()[3 : 3 + 64 * 96].view(64, 96),
        "rows apart": x[:, :64],
        "half": x.half(),
    }


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "nvfp4-4over6"])
def test_a_million_random_blocks(name):
    block = table.get(name).block_cols
    gen = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(1000, 1000 * block, generator=gen, device="cuda")
    x = (x * torch.exp2(torch.randn(1000, 1000 * block, generator=gen, device="cuda") * 3)).bfloat16()
    for rounding in ({}, stochastic()):
        call = Call(op="quantize", args=(x.cpu(), name, -1), named={"outer": "row", **rounding})
        assert call.wrong(ops, "cuda") == []


def test_tiles_do_not_change_draws():
    from nybble.kernels.cuda import launch_rows, row_source

    x, fmt = hostile(64, 2048).cuda(), table.get("nvfp4")
    rows = row_source.as_rows(x, 16)
    draw = launch_rows.Draw(key=KEY.cuda(), layer=1, operand=1)
    results = []
    for tile in ((128, 4, 1), (64, 1, 2), (32, 2, 4)):
        codes = torch.zeros(64, 1024, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(64, 128, dtype=torch.uint8, device="cuda")
        amax = torch.zeros(64, device="cuda")
        launch_rows.quantize_rows(rows, fmt, 1, amax, None, None, draw, codes=codes, scales=scales, tile=tile)
        results.append(codes)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_two_hundred_repeats_beside_other_work():
    x = hostile(512, 1024).cuda()
    busy = torch.randn(2048, 2048, device="cuda")
    beside = torch.cuda.Stream()
    codes, scales, amax = ops.quantize(x, "nvfp4", -1, outer="tensor", **device(stochastic()))
    again = ops.requantize(codes, scales, amax, "nvfp4", -1, "tensor", list(x.shape), "mxfp8", -2)
    for _ in range(200):
        with torch.cuda.stream(beside):
            busy = (busy @ busy).clamp(-1, 1)
        c, s, a = ops.quantize(x, "nvfp4", -1, outer="tensor", **device(stochastic()))
        r = ops.requantize(c, s, a, "nvfp4", -1, "tensor", list(x.shape), "mxfp8", -2)
        pairs = zip((c, s, a, *r), (codes, scales, amax, *again), strict=True)
        assert all(same(g, w) for g, w in pairs)
    torch.cuda.synchronize()


def device(named):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in named.items()}


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 << 30,
    reason="needs 60 GiB",
)
def test_more_elements_than_int32_counts():
    rows, cols, tail = (1 << 17) + 64, 16384 + 32, 64
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    ids = torch.arange(rows)[-tail:]
    last = x[-tail:].cpu()
    for axis in (-1, -2):
        codes, scales, _ = ops.quantize(x, "mxfp8", axis, **device(stochastic()))
        want, want_scales, _ = reference.quantize(last, "mxfp8", axis, rows=ids, **stochastic())
        got = codes[-tail:] if axis == -1 else codes[:, -tail:]
        got_scales = scales[-tail:] if axis == -1 else scales[:, -tail // 32 :]
        assert same(got.cpu(), want)
        assert same(got_scales.cpu(), want_scales)


def test_hadamard_transforms_equal_the_reference():
    for rows, cols in ((7, 40), (515, 264)):
        for case in transform_cases(rows, cols):
            moved_case = [value.cuda() if isinstance(value, torch.Tensor) else value for value in case]
            assert same(ops.hadamard(*moved_case).cpu(), hadamard.transform(*case))


def test_ms_eden_equals_the_reference():
    for rows, cols in ((70, 300), (515, 264)):
        for case in eden_cases(rows, cols, OFFS if rows == 70 else OFFS * 8):
            assert case.wrong(ops, "cuda") == [], case
    # Behind the transform that the recipe has, and with more runs than a program takes.
    y = hadamard.transform(torch.randn(4096, 384), -2, 128, KEY, 3, 68)
    named = {"rounding": "eden", "key": KEY, "layer": 3, "operand": 4}
    assert Call(op="quantize", args=(y, "nvfp4", -2), named=named).wrong(ops, "cuda") == []
    assert (
        Call(op="fake_quantize", args=(y, "nvfp4", torch.bfloat16, -2), named=named).wrong(ops, "cuda") == []
    )


def test_kernels_serve_the_formats():
    assert can_run("cuda", "nvfp4") is None
    assert "cast" in str(can_run("cuda", "bf16"))


@pytest.mark.parametrize(
    ("name", "columns"), [("mxfp8", 512), ("mxfp8", 96), ("mxfp8", 4608), ("nvfp4", 384), ("nvfp4", 4608)]
)
def test_messages_equal_those_of_the_cpu(name, columns):
    x = hostile(200, columns)
    for named in ({}, stochastic(rows=torch.arange(200) * 3)):
        moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in named.items()}
        message = messages.pack(x, name, **named)
        assert torch.equal(messages.pack(x.cuda(), name, **moved).cpu(), message)
    picked = torch.randint(200, (300,))
    assert torch.equal(messages.take_rows(message.cuda(), picked.cuda()).cpu(), message[picked])
    places = torch.randint(-1, 200, (100, 3), dtype=torch.int32)
    for where in (None, places):
        got = messages.unpack(
            message.cuda(), name, columns, torch.bfloat16, None if where is None else where.cuda()
        )
        assert same(got.cpu(), messages.unpack(message, name, columns, torch.bfloat16, where))
