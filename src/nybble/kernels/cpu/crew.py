"""A kernel run by torch's threads without the interpreter: they take pieces of the work by themselves.

A thread that comes from Python waits for the interpreter's lock before each piece, and waking up to find it
free costs more than many a piece takes. Here the threads of `team.py` run a function that LLVM compiled: it
counts pieces up and calls the kernel, of which it knows the address, until none is left.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INDEX, _SHORT, _BYTES = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_ARGUMENTS, _KERNEL, _BEGIN, _END, _PIECES, _NEXT, _FAILED = range(7)


@intrinsic
def _share_out(_typing: Any, how: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        how, packed = values
        kernel, team, threads, pieces, begin, end = (builder.extract_value(how, i) for i in range(6))
        zero = ir.Constant(_INDEX, 0)
        box = cgutils.alloca_once(builder, ir.LiteralStructType([packed.type, *[_INDEX] * 6]))
        for place, value in enumerate((packed, kernel, begin, end, pieces, zero, zero)):
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

    arguments, address, begin, end, pieces = (
        builder.load(field(place)) for place in (_ARGUMENTS, _KERNEL, _BEGIN, _END, _PIECES)
    )
    items, taken = builder.sub(end, begin), (types.intp, types.intp, *kinds)
    form = context.call_conv.get_function_type(types.none, taken)
    kernel = builder.inttoptr(address, form.as_pointer())
    again, work, done = (body.append_basic_block(label) for label in ("again", "work", "done"))
    builder.branch(again)

    builder.position_at_end(again)
    one = ir.Constant(_INDEX, 1)
    piece = builder.atomic_rmw("add", field(_NEXT), one, "monotonic")
    builder.cbranch(builder.icmp_signed("<", piece, pieces), work, done)

    builder.position_at_end(work)
    first, last = (
        builder.add(begin, builder.sdiv(builder.mul(items, index), pieces))
        for index in (piece, builder.add(piece, one))
    )
    values = [first, last, *(builder.extract_value(arguments, i) for i in range(len(kinds)))]
    status, _ = context.call_conv.call_function(builder, kernel, types.none, taken, values)
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(one, field(_FAILED))
    builder.branch(again)

    builder.position_at_end(done)
    builder.ret_void()
    return body


def share_out(
    kernel: int, team: int, threads: int, pieces: int, begin: int, end: int, *arguments: Any
) -> bool:
    """Call kernel(first, last, *arguments) on ranges that together cover [begin, end); whether a call failed.

    Args:
        kernel: address of a compiled function of these arguments.
        team: address of what runs a function in `threads` threads, or 0 for the calling one alone.
        threads: how many.
        pieces: how many ranges.
        begin: the first work item.
        end: the one behind the last.
        arguments: whatever numba takes.
    """
    failed: bool = _share_out((kernel, team, threads, pieces, begin, end), arguments)
    return failed
