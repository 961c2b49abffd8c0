"""Fast implementations of the ops of `nybble.formats`, one a device.

Importing this package registers them.
"""

from nybble.kernels import cpu, cuda
from nybble.kernels.dispatch import can_run, reference_only

cpu.register()
cuda.register()

__all__ = ["can_run", "reference_only"]
