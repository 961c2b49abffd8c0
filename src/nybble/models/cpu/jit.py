"""How the kernels are compiled and called, and the elementary functions they share."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from nybble.kernels.cpu import jit
from nybble.kernels.cpu.jit import INSIDE, Kernel
from nybble.kernels.cpu.source import dense

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""What the compiler may do to floats. NaN and infinity keep their meaning."""

Floats = NDArray[np.float32]


@cache
def source_digest() -> bytes:
    """Digest of this folder and that of the kernels: a cached kernel is stale when a helper in another file
    has changed."""
    digest = hashlib.sha256(jit.source_digest())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def kernel(function: Callable[..., Any]) -> Kernel:
    """Compile on the first call, without the interpreter lock; cached where a folder can be written."""
    return Kernel(function, source_digest(), fastmath=FAST)


def helper(function: Callable[..., Any]) -> Any:
    """Compile for use inside kernels."""
    return njit(fastmath=FAST - {"reassoc"}, **INSIDE)(
        function
    )  # the order of additions carries exp's precision


def loop(function: Callable[..., Any]) -> Any:
    """Compile for use inside kernels: loops whose sums may be taken in any order."""
    return njit(fastmath=FAST, **INSIDE)(function)


def floats(x: Tensor) -> Floats:
    """A contiguous tensor as a numpy array over the same memory."""
    array: Floats = dense(x)
    return array


def addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Where contiguous FP32 tensors lie, for `line`; whoever calls keeps them alive."""
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    return np.array([x.data_ptr() for x in tensors], dtype=np.int64)


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:  # numba matches the names
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), codegen


@helper
def line(address: int, row: int, length: int) -> Floats:
    """Row `row` of the matrix of rows of `length` that lies at `address`."""
    row_of: Floats = carray(_pointer(address + 4 * row * length), (length,))
    return row_of


@helper
def exp(x: np.float32) -> np.float32:
    """e^x for |x| <= 87 to about one unit in the last place: 2^n times a polynomial (Cephes)."""
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = (np.int32(n) + np.int32(127)) << np.int32(23)
    return p * np.int32(power).view(np.float32)


@njit(error_model="numpy", fastmath={"nnan", "nsz"})
def larger(a: np.float32, b: np.float32) -> np.float32:
    """The larger of two numbers; either of them if one is NaN, which lets the compiler take many at once."""
    return a if a > b else b


@helper
def clamp(x: np.float32, limit: np.float32) -> np.float32:
    """x within +-limit; NaN stays NaN."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@helper
def tanh(x: np.float32) -> np.float32:
    """tanh to about two units in the last place: a polynomial near zero (Cephes), else through exp."""
    a = clamp(x, np.float32(9.0))
    far = np.float32(1.0) - np.float32(2.0) / (exp(a + a) + np.float32(1.0))
    z = a * a
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z - np.float32(5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z - np.float32(3.33332819422e-1)
    near = p * z * a + a
    return near if z < np.float32(0.390625) else far


@helper
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-clamp(x, np.float32(87.0))))
