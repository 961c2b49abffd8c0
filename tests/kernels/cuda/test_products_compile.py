"""Products of experts compile for Hopper without a GPU, and keep their sums in registers."""

import subprocess
from pathlib import Path

import pytest
import torch

from nybble.kernels import hopper
from nybble.kernels.hopper import FP8

pytestmark = pytest.mark.skipif(hopper.own_reason() is not None, reason=str(hopper.own_reason()))
SHARED = 227 << 10
"""Bytes of shared memory that a program may have."""
TYPES = {FP8: "fp8e4nv", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}


def compiled(kernel, arguments, named):
    """What the launch of `kernel` would compile for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as build
    from triton.experimental.gluon._runtime import GluonASTSource

    options = {name: named.pop(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion")}
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}
    signature, constants, facts = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                facts[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            facts[(i,)] = [["tt.divisibility", 16]]
        else:
            box = f"{TYPES[value.base.dtype]}{list(value.block_shape)}"
            signature[parameter.name] = f"tensordesc<{box},{value.layout!r}>"
    source = GluonASTSource(kernel, signature, constants, facts)
    return build(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture
def launches(monkeypatch):
    """What was compiled instead of launched."""
    from nybble.kernels.cuda import bf16_rows, fp8_groups, fp8_rows, launch_bf16, launch_fp8

    done = []

    class Compiling:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **named: done.append(compiled(self.kernel, arguments, named))

    for module in (launch_fp8, launch_bf16):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    for module, name in (
        (fp8_rows, "product_of_rows"),
        (fp8_groups, "product_of_groups"),
        (bf16_rows, "product_of_rows"),
    ):
        monkeypatch.setattr(module, name, Compiling(getattr(module, name)))
    return done


def check(kernels, instruction, folder):
    """That programs of `kernels` fit a multiprocessor, multiply with `instruction`, and spill nothing."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED
        assert instruction in kernel.asm["ptx"]
        path = folder / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        used = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in used, used


def test_fp8_products(launches, tmp_path):
    from nybble.kernels.cuda import launch_fp8

    codes, scales, ends = torch.empty(64, 128).to(FP8), torch.empty(64), torch.zeros(4, dtype=torch.int32)
    rows = (codes, scales, torch.empty(4, 64, 128).to(FP8), torch.empty(4, 64), ends)
    launch_fp8.product_of_rows(*rows)
    launch_fp8.product_of_rows(*rows, index=torch.zeros(64, dtype=torch.int32))
    for scales in (torch.empty(4, 64), None):
        launch_fp8.product_of_groups(codes, scales, codes, torch.empty(4, 64), ends, torch.float32)
    assert len(launches) == 4
    check(launches, "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", tmp_path)


def test_products_by_rows_that_stream(launches, tmp_path):
    from nybble.kernels.cuda import launch_bf16

    ends = torch.zeros(4, dtype=torch.int32)
    for features in (448, 512):
        a, w = torch.empty(300, features).bfloat16(), torch.empty(4, 136, features).bfloat16()
        launch_bf16.product_of_rows(a, w, ends, True)
        launch_bf16.product_of_rows(a, w.transpose(1, 2), ends, False)
    assert len(launches) == 4
    check(launches, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", tmp_path)
