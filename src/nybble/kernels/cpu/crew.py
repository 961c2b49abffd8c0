"""A kernel run by torch's threads without the interpreter: they take pieces of the work by themselves.

A thread that comes from Python waits for the interpreter's lock before each piece, and waking up to find it
free costs more than many a piece takes. Here the threads of `team.py` run a function that LLVM compiled: it
counts pieces up and calls the kernel, of which it knows the address, until none is left. Each thread begins
with the pieces of its own part, so that what one kernel leaves in a core's cache the next one finds there,
and then helps the others.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INDEX, _SHORT, _BYTES = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_ARGUMENTS, _KERNEL, _NUMBER, _THREADS, _PIECES, _BEGIN, _END, _TAKEN, _FAILED = range(9)
_LINE = 8
"""Counters of pieces lie as many numbers apart: each has a line of the cache to itself."""


@intrinsic
def _share_out(_typing: Any, how: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        how, packed = values
        kernel, team, number, threads, pieces, begin, end = (builder.extract_value(how, i) for i in range(7))
        zero = ir.Constant(_INDEX, 0)
        taken = builder.alloca(_INDEX, builder.mul(threads, ir.Constant(_INDEX, _LINE)))
        with cgutils.for_range(builder, threads) as loop:
            builder.store(zero, builder.gep(taken, [builder.mul(loop.index, ir.Constant(_INDEX, _LINE))]))
        fields = packed, kernel, number, threads, pieces, begin, end, taken, zero
        box = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in fields]))
        for place, value in enumerate(fields):
            builder.store(value, cgutils.gep_inbounds(builder, box, 0, place))
        body, data = _body(context, builder, arguments.types, box), builder.bitcast(box, _BYTES)
        with builder.if_else(builder.icmp_signed("==", team, zero)) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                form = ir.FunctionType(ir.VoidType(), [body.type, _BYTES, _SHORT, _SHORT])
                parallel = builder.inttoptr(team, form.as_pointer())
                builder.call(parallel, [body, data, builder.trunc(threads, _SHORT), ir.Constant(_SHORT, 0)])
        failed = builder.load(cgutils.gep_inbounds(builder, box, 0, _FAILED))
        return builder.icmp_signed("!=", failed, zero)

    return types.boolean(how, arguments), codegen


def _body(context: Any, caller: Any, kinds: Any, box: Any) -> Any:
    """void body(box): what each thread runs."""
    module, name = caller.module, f"{caller.function.name}.body"
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES]), name)
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    box = builder.bitcast(body.args[0], box.type)

    def field(place: int) -> Any:
        return cgutils.gep_inbounds(builder, box, 0, place)

    arguments, address, number, threads, pieces, begin, end, counters = (
        builder.load(field(place)) for place in range(_FAILED)
    )
    items, given = builder.sub(end, begin), (types.intp, types.intp, *kinds)
    form = context.call_conv.get_function_type(types.none, given)
    kernel = builder.inttoptr(address, form.as_pointer())
    values = [builder.extract_value(arguments, i) for i in range(len(kinds))]
    one = ir.Constant(_INDEX, 1)

    def part(whole: Any, index: Any, count: Any) -> Any:
        return builder.sdiv(builder.mul(whole, index), count)

    me = cgutils.alloca_once_value(builder, ir.Constant(_INDEX, 0))
    with builder.if_then(builder.icmp_signed(">", threads, one)):
        ask = builder.inttoptr(number, ir.FunctionType(_SHORT, []).as_pointer())
        builder.store(builder.sext(builder.call(ask, []), _INDEX), me)
    with cgutils.for_range(builder, threads) as loop:
        whose = builder.srem(builder.add(builder.load(me), loop.index), threads)
        low = part(pieces, whose, threads)
        count = builder.sub(part(pieces, builder.add(whose, one), threads), low)
        counter = builder.gep(counters, [builder.mul(whose, ir.Constant(_INDEX, _LINE))])
        again, work, done = (body.append_basic_block(label) for label in ("again", "work", "done"))
        builder.branch(again)

        builder.position_at_end(again)
        taken = builder.atomic_rmw("add", counter, one, "monotonic")
        builder.cbranch(builder.icmp_signed("<", taken, count), work, done)

        builder.position_at_end(work)
        piece = builder.add(low, taken)
        first, last = (
            builder.add(begin, part(items, index, pieces)) for index in (piece, builder.add(piece, one))
        )
        status, _ = context.call_conv.call_function(
            builder, kernel, types.none, given, [first, last, *values]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(one, field(_FAILED))
        builder.branch(again)

        builder.position_at_end(done)
    builder.ret_void()
    return body


def share_out(
    kernel: int, team: int, number: int, threads: int, pieces: int, begin: int, end: int, *arguments: Any
) -> bool:
    """Call kernel(first, last, *arguments) on ranges that together cover [begin, end); whether a call failed.

    Args:
        kernel: address of a compiled function of these arguments.
        team: address of what runs a function in `threads` threads, or 0 for the calling one alone.
        number: address of what tells a thread of the team its number.
        threads: how many.
        pieces: how many ranges.
        begin: the first work item.
        end: the one behind the last.
        arguments: whatever numba takes.
    """
    failed: bool = _share_out((kernel, team, number, threads, pieces, begin, end), arguments)
    return failed
