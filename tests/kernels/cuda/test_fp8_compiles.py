"""FP8 products compile for Hopper without a GPU, and keep their sums in registers."""

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

    options = {name: named.pop(name) for name in ("num_warps", "maxnreg")}
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
    from nybble.kernels.cuda import fp8_groups, fp8_rows, launch_fp8

    done = []

    class Compiling:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **named: done.append(compiled(self.kernel, arguments, named))

    monkeypatch.setattr(launch_fp8, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(fp8_rows, "product_of_rows", Compiling(fp8_rows.product_of_rows))
    monkeypatch.setattr(fp8_groups, "product_of_groups", Compiling(fp8_groups.product_of_groups))
    return done


def test_kernels_fit_a_multiprocessor(launches, tmp_path):
    import triton.backends.nvidia

    from nybble.kernels.cuda import launch_fp8

    codes, scales, ends = torch.empty(64, 128).to(FP8), torch.empty(64), torch.zeros(4, dtype=torch.int32)
    rows = (codes, scales, torch.empty(4, 64, 128).to(FP8), torch.empty(4, 64), ends)
    launch_fp8.product_of_rows(*rows)
    launch_fp8.product_of_rows(*rows, index=torch.zeros(64, dtype=torch.int32))
    launch_fp8.product_of_groups(codes, torch.empty(4, 64), codes, torch.empty(4, 64), ends, torch.float32)
    assert len(launches) == 3
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    for kernel in launches:
        assert kernel.metadata.shared <= SHARED
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
        path = tmp_path / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        used = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in used, used
