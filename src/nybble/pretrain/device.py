"""Where a run computes, and what that means for its numbers and its speed."""

from __future__ import annotations

import torch

from nybble.errors import ConfigError
from nybble.kernels import blackwell


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises ConfigError if a GPU is asked for and there is none."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError("device is cuda, but torch sees no GPU; leave the flag out to compute on the CPU")
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def numerics_status(device: torch.device) -> str:
    """One line on how low precision is computed here."""
    if device.type == "cpu":
        return "CPU: exact numerics, emulated: numba quantisers, FP32 GEMMs on dequantised operands"
    name = torch.cuda.get_device_name(device)
    reason = blackwell.can_run(device, "nvfp4")
    if reason is None:
        return f"{name}: {blackwell.STATUS}"
    return (
        f"{name}: exact numerics, emulated: Triton quantisers, BF16 tensor cores on dequantised operands; "
        f"no FP4 speed, because {reason}"
    )
