"""Launches that skip Triton's own look at the arguments take the code compiled for such arguments."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class Compiler:
    """A Triton function f(x_ptr, n, k: constexpr, SIZE: constexpr) that says what is compiled and run."""

    arg_names = ("x_ptr", "n", "k", "SIZE")
    params = tuple(
        SimpleNamespace(is_constexpr=constant, do_not_specialize=plain)
        for constant, plain in ((False, False), (False, False), (True, False), (True, False))
    )

    def __init__(self):
        self.compiled, self.runs = [], []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled.append((args, options))
            number = len(self.compiled)

            def run(*a):
                self.runs.append((number, a))

            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return compile_and_run


@pytest.fixture
def launched(monkeypatch):
    from nybble.kernels.cuda import jit

    if jit.INTERPRETED:
        pytest.skip("Triton is interpreted")
    monkeypatch.setattr(jit, "OWN_LAUNCH", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    compiler = Compiler()
    return compiler, jit.Launched(compiler)


def test_a_second_launch_runs_what_the_first_compiled(launched):
    compiler, kernel = launched
    x = torch.zeros(64)
    kernel[3, 2](x, 32, 2, SIZE=8, num_warps=4)
    kernel[5,](x, 48, 2, SIZE=8, num_warps=4)
    assert len(compiler.compiled) == 1
    assert compiler.runs == [(1, (5, 1, 1, 7, "f", "m", None, None, None, x, 48, 2, 8))]


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (lambda x: (x, 1, 2), {}),
        (lambda x: (x, 33, 2), {}),
        (lambda x: (x, 1 << 40, 2), {}),
        (lambda x: (x[1:], 32, 2), {}),
        (lambda x: (x.bfloat16(), 32, 2), {}),
        (lambda _: (None, 32, 2), {}),
        (lambda x: (x, 32, 3), {}),
        (lambda x: (x, 32, 2), {"SIZE": 16}),
        (lambda x: (x, 32, 2), {"num_warps": 8}),
    ],
    ids=["one", "odd", "large", "unaligned", "dtype", "none", "constant", "constexpr", "warps"],
)
def test_other_kinds_of_arguments_are_compiled_for_themselves(launched, other, options):
    compiler, kernel = launched
    x = torch.zeros(64)
    kernel[1,](x, 32, 2, SIZE=8, num_warps=4)
    kernel[1,](*other(x), **{"SIZE": 8, "num_warps": 4, **options})
    assert len(compiler.compiled) == 2
    assert not compiler.runs
