"""Kernels that read, write and add one element too far, which `watched.py` must find."""

import torch
import triton
import triton.language as tl


@triton.jit
def touch(x_ptr, y_ptr, shift, STORE: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.arange(0, 16)
    if STORE:
        tl.store(y_ptr + i + shift, 1.0, mask=i < 15)
    elif ATOMIC:
        tl.atomic_add(y_ptr + i + shift, 1.0, mask=i < 15)
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + i + shift, mask=i < 15, other=0.0))


def outcome(shift: int, store: bool, atomic: bool) -> str:
    # In the middle of memory of the process's own, where nothing faults.
    x, y = torch.zeros(64)[16:32], torch.zeros(64)[16:32]
    try:
        touch[(1,)](x, y, shift, STORE=store, ATOMIC=atomic)
    except Exception as error:
        return "found" if "touch touches 1 element" in str(error) else repr(error)
    return "passed"


for store, atomic in ((False, False), (True, False), (False, True)):
    got = [outcome(shift, store, atomic) for shift in (-1, 0, 1, 2)]
    assert got == ["found", "passed", "passed", "found"], (store, atomic, got)
