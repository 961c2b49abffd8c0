"""Dialects that are read and not written: gpt-oss MXFP4, DeepSeek's FP8 blocks and SGLang's MXFP8."""

from __future__ import annotations

from typing import Any

from nybble.checkpoints.dialects.base import Dialect, Pieces, Stored, Written
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.writer import Spec
from nybble.errors import CheckpointError


class ReadOnly(Dialect):
    """A dialect without a writer."""

    kinds = ()

    def matrix_specs(self, module: str, rows: int, cols: int, kind: str, activations: bool) -> list[Spec]:
        raise CheckpointError(f"the {self.name} dialect is read only; export to another")

    def matrix_tensors(self, module: str, packed: Packed, activations: bool) -> Pieces:
        raise CheckpointError(f"the {self.name} dialect is read only; export to another")

    def configs(
        self, config: dict[str, Any], written: list[Written], plain: list[str], activations: bool
    ) -> dict[str, dict[str, Any]]:
        raise CheckpointError(f"the {self.name} dialect is read only; export to another")


class GptOss(ReadOnly):
    """`P.gate_up_proj_blocks` [E, 2I, H/32, 16] and `_scales` [E, 2I, H/32]; the model's parameter is their transpose."""

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


class Fp8Blocks(ReadOnly):
    """`P.weight` E4M3 with `P.weight_scale_inv`: FP32 over 128x128 blocks, or bytes of E8M0 over 32 columns."""

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
