"""Bit casts between float32 and uint32, and constants as bit patterns."""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

U32: Any = np.uint32
F32: Any = np.float32
U64: Any = np.uint64
"""Indices are cast to it where they are sums: a signed index costs a test for wrapping around."""

ABS = U32(0x7FFFFFFF)
SIGN = U32(0x80000000)
INFINITY = U32(0x7F800000)
"""Bits of +Inf; magnitudes at or above it are not finite. Also the mask of the exponent field."""
FLT_MAX = np.finfo(np.float32).max
NAN = np.float32(np.nan)


@intrinsic
def as_float(context: Any, x: Any) -> Any:  # noqa: ARG001
    """float32 with the bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(context: Any, x: Any) -> Any:  # noqa: ARG001
    """uint32 with the bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def shift_right(context: Any, x: Any, count: Any) -> Any:  # noqa: ARG001
    """x >> count of uint32, for a count below 32 that is not a constant: numba would shift in 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.lshr(*arguments)

    return types.uint32(types.uint32, types.uint32), generate
