"""Runs of 16 elements as LLVM vectors.

Written as loops they would be slow: numba cannot promise LLVM that two arrays do not overlap, so that stores
to one would wait for loads of the other, element by element. As vectors they are one load, one operation and
one store.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from nybble.kernels.cpu.bits import ABS

RUN = 16
_FLOATS = ir.VectorType(ir.FloatType(), RUN)
_WORDS = ir.VectorType(ir.IntType(32), RUN)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, element: Any) -> Any:
    """Pointer to array[index] as a pointer to `element`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


@intrinsic
def peak_of_run(context: Any, x: Any, index: Any) -> Any:  # noqa: ARG001
    """Bits of the largest |x| of x[index : index + 16]; NaN counts as larger than infinity."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = arguments
        words = _address(context, builder, signature.args[0], array, at, _WORDS)
        magnitude = builder.and_(builder.load(words, align=4), ir.Constant(_WORDS, [int(ABS)] * RUN))
        reduce = ir.FunctionType(ir.IntType(32), [_WORDS])
        name = f"llvm.vector.reduce.umax.v{RUN}i32"
        return builder.call(get_or_insert_function(builder.module, reduce, name), [magnitude])

    return types.uint32(x, types.uint64), generate


@intrinsic
def scale_run(context: Any, x: Any, index: Any, scale: Any, out: Any, to: Any) -> Any:  # noqa: ARG001
    """out[to : to + 16] = x[index : index + 16] * scale."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, scale, out, to = arguments
        source = builder.load(_address(context, builder, signature.args[0], array, index, _FLOATS), align=4)
        empty = ir.Constant(_FLOATS, ir.Undefined)
        one = builder.insert_element(empty, scale, ir.Constant(ir.IntType(32), 0))
        same = ir.Constant(_WORDS, [0] * RUN)
        product = builder.fmul(source, builder.shuffle_vector(one, empty, same))
        builder.store(product, _address(context, builder, signature.args[3], out, to, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(x, types.uint64, types.float32, out, types.uint64), generate


@intrinsic
def copy_pair(context: Any, x: Any, index: Any, out: Any, to: Any) -> Any:  # noqa: ARG001
    """out[to : to + 2] = x[index : index + 2], of float32, in one move."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, out, to = arguments
        word = ir.IntType(64)
        pair = builder.load(_address(context, builder, signature.args[0], array, index, word), align=4)
        builder.store(pair, _address(context, builder, signature.args[2], out, to, word), align=4)
        return context.get_dummy_value()

    return types.void(x, types.uint64, out, types.uint64), generate
