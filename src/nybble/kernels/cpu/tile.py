"""A small product of matrices inside kernels: tiles of the result stay in registers while it adds up.

What is multiplied here lies in a core's cache already. The compiler does not keep a block of sums in
registers by itself, so that a tile is written out as LLVM's vectors, which fit registers of any width.
"""

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from nybble.kernels.cpu.jit import helper

Floats = NDArray[np.float32]

LANES = 16
"""Columns of a tile; buffers whose rows are padded to a multiple of it are multiplied fastest."""

ROWS = 4

FUSED = ("contract",)
"""Multiplication and addition may become one instruction."""


def tile(rows: int, lanes: int) -> Any:
    """An intrinsic: `rows` by `lanes` of c (+)= a @ b, each given by an array, an offset and steps."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_at, a_row, a_step, b, b_at, b_step, c, c_at, c_row, depth, add = arguments
        vector = ir.VectorType(ir.FloatType(), lanes)

        def pointer(array: Any, which: int, at: Any) -> Any:
            data = context.make_array(signature.args[which])(context, builder, array).data
            return builder.gep(data, [at])

        def wide(address: Any) -> Any:
            return builder.bitcast(address, vector.as_pointer())

        a, b, c = pointer(a, 0, a_at), pointer(b, 4, b_at), pointer(c, 7, c_at)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * lanes)) for _ in range(rows)]
        for total in sums:
            builder.store(ir.Constant(vector, [0.0] * lanes), total)
        with cgutils.for_range(builder, depth) as loop:
            right = builder.load(wide(builder.gep(b, [builder.mul(loop.index, b_step)])), align=4)
            along = builder.mul(loop.index, a_step)
            for i, total in enumerate(sums):
                row = builder.mul(a_row, ir.Constant(a_row.type, i))
                left = builder.load(builder.gep(a, [builder.add(along, row)]), align=4)
                one = builder.insert_element(
                    ir.Constant(vector, ir.Undefined), left, ir.Constant(ir.IntType(32), 0)
                )
                mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                spread = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)
                term = builder.fmul(spread, right, flags=FUSED)
                builder.store(builder.fadd(term, builder.load(total), flags=FUSED), total)
        for i, total in enumerate(sums):
            place = wide(builder.gep(c, [builder.mul(c_row, ir.Constant(c_row.type, i))]))
            with builder.if_else(add) as (more, fresh):
                with more:
                    builder.store(
                        builder.fadd(builder.load(place, align=4), builder.load(total)), place, align=4
                    )
                with fresh:
                    builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    def typing(  # numba matches the names
        _context: Any, a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_step: Any,
        c: Any, c_at: Any, c_row: Any, depth: Any, add: Any,
    ) -> Any:  # fmt: skip
        del a_at, a_row, a_step, b_at, b_step, c_at, c_row, depth, add
        n = types.intp
        return types.void(a, n, n, n, b, n, n, c, n, n, n, types.boolean), codegen

    return intrinsic(typing)


_whole, _row = tile(ROWS, LANES), tile(1, LANES)
_one = tile(1, 1)


@helper
def multiply(
    a: Floats, a_at: int, a_row: int, a_step: int, b: Floats, b_at: int, b_step: int,
    c: Floats, c_at: int, c_row: int, M: int, N: int, K: int, add: bool,
) -> None:  # fmt: skip
    """c[i, n] = sum over k of a[i, k] * b[k, n], added to what c holds if `add`.

    Of each array only the memory counts, from an offset on: a has any step between rows and along k, b and c
    lie contiguous along n.
    """
    for n in range(0, N // LANES * LANES, LANES):
        whole = M // ROWS * ROWS
        for i in range(0, whole, ROWS):
            x, y = a_at + i * a_row, c_at + i * c_row + n
            _whole(a, x, a_row, a_step, b, b_at + n, b_step, c, y, c_row, K, add)
        for i in range(whole, M):
            x, y = a_at + i * a_row, c_at + i * c_row + n
            _row(a, x, a_row, a_step, b, b_at + n, b_step, c, y, c_row, K, add)
    for n in range(N // LANES * LANES, N):
        for i in range(M):
            x, y = a_at + i * a_row, c_at + i * c_row + n
            _one(a, x, a_row, a_step, b, b_at + n, b_step, c, y, c_row, K, add)


def transpose(size: int) -> Any:
    """An intrinsic: `size` (2, 4 or 8) rows of as many numbers become columns, through registers; each side
    given by an array, an offset and a step between rows."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_at, x_row, y, y_at, y_row = arguments
        vector, index = ir.VectorType(ir.FloatType(), size), ir.IntType(32)

        def row(array: Any, which: int, at: Any, step: Any, i: int) -> Any:
            data = context.make_array(signature.args[which])(context, builder, array).data
            place = builder.add(at, builder.mul(step, ir.Constant(step.type, i)))
            return builder.bitcast(builder.gep(data, [place]), vector.as_pointer())

        rows = [builder.load(row(x, 0, x_at, x_row, i), align=4) for i in range(size)]
        half = size // 2
        while half:  # exchange blocks of half by half numbers across the diagonal
            low = [i if not i & half else size + (i ^ half) for i in range(size)]
            high = [i | half if not i & half else size + i for i in range(size)]
            masks = [ir.Constant(ir.VectorType(index, size), mask) for mask in (low, high)]
            for i in range(size):
                if not i & half:
                    pair = rows[i], rows[i | half]
                    rows[i], rows[i | half] = (builder.shuffle_vector(*pair, mask) for mask in masks)
            half //= 2
        for i, column in enumerate(rows):
            builder.store(column, row(y, 3, y_at, y_row, i), align=4)
        return context.get_dummy_value()

    def typing(_context: Any, x: Any, x_at: Any, x_row: Any, y: Any, y_at: Any, y_row: Any) -> Any:
        del x_at, x_row, y_at, y_row
        n = types.intp
        return types.void(x, n, n, y, n, n), codegen

    return intrinsic(typing)


def move(lanes: int) -> Any:
    """An intrinsic: as many neighbours copied; each side given by an array and an offset."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), lanes)
        x, y = (
            builder.bitcast(
                builder.gep(context.make_array(signature.args[i])(context, builder, arguments[i]).data, [at]),
                vector.as_pointer(),
            )
            for i, at in ((0, arguments[1]), (2, arguments[3]))
        )
        builder.store(builder.load(x, align=4), y, align=4)
        return context.get_dummy_value()

    def typing(_context: Any, x: Any, x_at: Any, y: Any, y_at: Any) -> Any:
        del x_at, y_at
        return types.void(x, types.intp, y, types.intp), codegen

    return intrinsic(typing)


def vector_lanes() -> int:
    """FP32 numbers of a register of this machine's widest vectors that are worth using."""
    return 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
