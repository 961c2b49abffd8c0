"""GEMMs on codes, for GPUs that multiply NVFP4 and MXFP8 themselves (Blackwell, compute capability 10.0).

Not yet run on this hardware. What is proven, on a CPU: the layout of scales against the formula, and every
argument of the calls against an emulation that undoes that layout.
"""

from nybble.kernels.blackwell.choice import STATUS, can_run, chosen, kernel
from nybble.kernels.blackwell.coded import Coded, coded
from nybble.kernels.blackwell.gemm import (
    product,
    product_of_groups,
    product_of_rows,
    scaled_grouped,
    scaled_linear,
    scaled_wgrad,
)
from nybble.kernels.blackwell.swizzle import Swizzled, swizzle, swizzle_column_groups, swizzle_row_groups

__all__ = [
    "STATUS",
    "Coded",
    "Swizzled",
    "can_run",
    "chosen",
    "coded",
    "kernel",
    "product",
    "product_of_groups",
    "product_of_rows",
    "scaled_grouped",
    "scaled_linear",
    "scaled_wgrad",
    "swizzle",
    "swizzle_column_groups",
    "swizzle_row_groups",
]
