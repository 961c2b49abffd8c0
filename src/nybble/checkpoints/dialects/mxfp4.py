"""Dialects that are read and not written: gpt-oss MXFP4, DeepSeek's FP8 blocks and SGLang's MXFP8."""

from __future__ import annotations

from nybble.checkpoints.dialects.base import Reader, Stored
from nybble.checkpoints.safetensors_io import Folder


class GptOss(Reader):
    """`P.gate_up_proj_blocks` [E, 2I, H/32, 16] and `_scales` [E, 2I, H/32]; the model's parameter is their
    transpose.
    """

    name = "mxfp4"

    def find(self, folder: Folder) -> list[Stored]:
        found = []
        for name, entry in folder.tensors.items():
            if name.endswith("_blocks") and len(entry.shape) == 4:
                module = name.removesuffix("_blocks")
                scales = f"{module}_scales"
                expected = {name: "U8", scales: "U8"}
                found.append(
                    Stored(
                        module=module,
                        kind="mxfp4",
                        codes=name,
                        scales=scales,
                        rank=4,
                        expected=expected,
                    )
                )
        return found


class Fp8Blocks(Reader):
    """`P.weight` E4M3 with `P.weight_scale_inv`: FP32 over 128x128 blocks, or E8M0 bytes over 32 columns."""

    name = "fp8"

    def find(self, folder: Folder) -> list[Stored]:
        found = []
        for name, entry in folder.tensors.items():
            scales = f"{name}_scale_inv"
            if name.endswith(".weight") and entry.dtype == "F8_E4M3" and scales in folder:
                mx = folder.entry(scales).dtype in ("U8", "F8_E8M0")
                module = name.removesuffix(".weight")
                found.append(Stored(module=module, kind="mxfp8" if mx else "fp8", codes=name, scales=scales))
        return found
