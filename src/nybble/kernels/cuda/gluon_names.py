"""Names of Gluon that changed: barriers in triton 3.7, copies and views of buffers in 3.9."""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same bytes of shared memory."""
        return buffer.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same bytes of shared memory."""
        return buffer._reinterpret(dtype, shape, layout)
