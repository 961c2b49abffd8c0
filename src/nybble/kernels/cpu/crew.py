"""A kernel run by torch's threads without the interpreter: they take pieces of the work by themselves.

A thread that comes from Python waits for the interpreter's lock before each piece, and waking up to find it
free costs more than many a piece takes. Here the threads of `team.py` run a function that LLVM compiled
around the kernel: it counts pieces up and calls the kernel until none is left.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INDEX, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
_ARGUMENTS, _BEGIN, _END, _PIECES, _NEXT, _FAILED = range(6)


@intrinsic
def share_out(typing: Any, kernel: Any, how: Any, arguments: Any) -> Any:
    """Call kernel(first, last, *arguments) for all pieces of [begin, end), and say whether any call failed.

    `how` is (team, threads, pieces, begin, end): the address of what runs a function in so many threads, or 0
    for the calling one alone.
    """
    taken = kernel.get_call_type(typing, (types.intp, types.intp, *arguments.types), {})

    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        _, how, packed = values
        team, threads, pieces, begin, end = (builder.extract_value(how, i) for i in range(5))
        zero, short = ir.Constant(_INDEX, 0), ir.IntType(32)
        box = cgutils.alloca_once(builder, ir.LiteralStructType([packed.type, *[_INDEX] * 5]))
        for place, value in enumerate((packed, begin, end, pieces, zero, zero)):
            builder.store(value, cgutils.gep_inbounds(builder, box, 0, place))
        body = _body(context, builder, kernel.dispatcher.get_compile_result(taken), box, len(arguments.types))
        data = builder.bitcast(box, _BYTES)
        with builder.if_else(builder.icmp_signed("==", team, zero)) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                form = ir.FunctionType(ir.VoidType(), [body.type, _BYTES, short, short])
                parallel = builder.inttoptr(team, form.as_pointer())
                builder.call(parallel, [body, data, builder.trunc(threads, short), ir.Constant(short, 0)])
        failed = builder.load(cgutils.gep_inbounds(builder, box, 0, _FAILED))
        return builder.icmp_signed("!=", failed, zero)

    return types.boolean(kernel, how, arguments), codegen


def _body(context: Any, caller: Any, made: Any, box: Any, count: int) -> Any:
    """void body(box): what each thread runs."""
    module, name = caller.module, f"{caller.function.name}.body"
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES]), name)
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    box = builder.bitcast(body.args[0], box.type)
    arguments, begin, end, pieces = (
        builder.load(cgutils.gep_inbounds(builder, box, 0, place))
        for place in (_ARGUMENTS, _BEGIN, _END, _PIECES)
    )
    items = builder.sub(end, begin)
    again, work, done = (body.append_basic_block(label) for label in ("again", "work", "done"))
    builder.branch(again)

    builder.position_at_end(again)
    one = ir.Constant(_INDEX, 1)
    piece = builder.atomic_rmw("add", cgutils.gep_inbounds(builder, box, 0, _NEXT), one, "monotonic")
    builder.cbranch(builder.icmp_signed("<", piece, pieces), work, done)

    builder.position_at_end(work)
    first, last = (
        builder.add(begin, builder.sdiv(builder.mul(items, index), pieces))
        for index in (piece, builder.add(piece, one))
    )
    fndesc = made.fndesc
    kernel = context.declare_function(module, fndesc)
    context.active_code_library.add_linking_library(made.library)
    taken = [first, last, *(builder.extract_value(arguments, i) for i in range(count))]
    status, _ = context.call_conv.call_function(builder, kernel, fndesc.restype, fndesc.argtypes, taken)
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(one, cgutils.gep_inbounds(builder, box, 0, _FAILED))
    builder.branch(again)

    builder.position_at_end(done)
    builder.ret_void()
    return body
