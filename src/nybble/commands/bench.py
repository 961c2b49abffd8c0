"""`nybble bench`: the ladder of the kernels of the device at hand."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nybble.commands.flags import parse_flags
from nybble.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time every kernel, with the bytes or operations that it must do and the share of the device's ceiling.

    Ceilings are measured in turns with each kernel, as a device is slower when it is warm: a large copy for
    what moves memory, a large matrix product for what computes. Ratios are times over those of the same in
    BF16, and over torchao's where it is installed.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto takes a GPU if there is one."""
    rows: int = 0
    """Tokens of the tensor; 0 takes 16384 on a GPU and 2048 on a CPU."""
    cols: int = 0
    """Features of the tensor; 0 takes 8192 on a GPU and 2048 on a CPU."""
    experts: int = 16
    """Groups of tokens."""
    json: Path | None = None
    """Also write the figures to this file."""

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            value = getattr(self, name)
            if value < 0 or value % 64:
                raise ConfigError(f"{name} is {value}; it must be a multiple of 64")
        if self.experts < 1:
            raise ConfigError(f"experts is {self.experts}; it must be at least 1")
        if self.json is not None and (self.json.is_dir() or not os.access(self.json.parent, os.W_OK)):
            raise ConfigError(f"json is {self.json}; name a file in a folder that can be written to")


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(BenchConfig, arguments, "bench")
    import torch

    from nybble.analysis import ladder
    from nybble.pretrain.device import numerics_status, pick_device

    device = pick_device(config.device)
    rows, cols = (16384, 8192) if device.type == "cuda" else (2048, 2048)
    rows, cols = config.rows or rows, config.cols or cols
    print(f"device  {numerics_status(device)}")
    print(f"input   BF16 [{rows}, {cols}], {config.experts} experts, torch {torch.__version__}; medians")
    print(ladder.HEAD)
    found = ladder.climb(device, rows, cols, config.experts, lambda m: print(m.line(), flush=True))
    if config.json is not None:
        config.json.write_text(json.dumps([_plain(m) for m in found], indent=1) + "\n")
    return 0


def _plain(measured: Any) -> dict[str, Any]:
    rung = measured.rung
    values = {name: value for name, value in asdict(measured).items() if name != "rung"}
    return {"name": rung.name, "bytes": rung.bytes, "operations": rung.operations, **values}
