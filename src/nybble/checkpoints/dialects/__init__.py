"""The dialects of four-bit checkpoints, and which of them a folder speaks."""

from __future__ import annotations

from nybble.checkpoints.dialects.base import Dialect, Reader, Stored, Written
from nybble.checkpoints.dialects.compressed_tensors import CompressedTensors
from nybble.checkpoints.dialects.inkling2 import Inkling2
from nybble.checkpoints.dialects.modelopt import ModelOpt
from nybble.checkpoints.dialects.mxfp4 import Fp8Blocks, GptOss
from nybble.checkpoints.header import section
from nybble.checkpoints.safetensors_io import Folder

WRITABLE: dict[str, type[Dialect]] = {d.name: d for d in (CompressedTensors, ModelOpt, Inkling2)}

__all__ = ["WRITABLE", "Dialect", "Reader", "Stored", "Written", "detect"]


def detect(folder: Folder) -> Reader | None:
    """The dialect of a folder, by its tensors first, as configs lie more often; None for high precision."""
    leaves = {name.rpartition(".")[2] for name in folder}
    if any(leaf.endswith("_blocks") for leaf in leaves):
        return GptOss()
    if "weight_packed" in leaves:
        return CompressedTensors()
    if "weight_scale_2" in leaves:
        return ModelOpt()
    if leaves & {"w13_weight_scale", "w2_weight_scale"}:
        return Inkling2()
    if "weight_scale_inv" in leaves:
        return Fp8Blocks()
    method = section(folder.config, "quantization_config").get("quant_method")
    if isinstance(method, str) and method in WRITABLE:
        return WRITABLE[method]()
    return CompressedTensors() if "weight_scale" in leaves else None
