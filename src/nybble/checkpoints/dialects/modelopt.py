"""ModelOpt: what NVIDIA's Model Optimizer writes and vLLM, SGLang and TensorRT-LLM read.

`weight_scale_2` (0-d) is S_dec, a number to multiply with: readers that multiply as written get the trainer's
weights to the bit. `input_scale` is 1.0 on every NVFP4 matrix, in weight-only files too: vLLM left the slot
uninitialised where it was missing (vllm#54189).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nybble.checkpoints.dialects.base import Dialect, Pieces, Stored, Written, scale_bytes, scale_specs
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.writer import Spec

PRODUCER = {"name": "modelopt", "version": "0.40.0"}
"""Readers look for this name; the version is that of the layout."""
GROUP = {"nvfp4": 16, "mxfp8": 32}


class ModelOpt(Dialect):
    """See the module."""

    name = "modelopt"
    kinds: ClassVar[tuple[str, ...]] = ("nvfp4", "mxfp8")

    def matrix_specs(self, module: str, rows: int, cols: int, kind: str) -> list[Spec]:
        if kind == "mxfp8":
            return [Spec(f"{module}.weight", "F8_E4M3", (rows, cols)), scale_specs(module, rows, cols, kind)]
        return [
            Spec(f"{module}.weight", "U8", (rows, cols // 2)),
            scale_specs(module, rows, cols, kind),
            Spec(f"{module}.weight_scale_2", "F32", ()),
            Spec(f"{module}.input_scale", "F32", ()),
        ]

    def matrix_tensors(self, module: str, packed: Packed) -> Pieces:
        codes = packed.codes.view(torch.float8_e4m3fn) if packed.kind == "mxfp8" else packed.codes
        yield f"{module}.weight", codes, 0
        yield f"{module}.weight_scale", scale_bytes(packed), 0
        if packed.kind == "nvfp4":
            assert packed.multiplier is not None
            yield f"{module}.weight_scale_2", packed.multiplier.reshape(()), 0
            yield f"{module}.input_scale", torch.ones(()), 0

    def configs(
        self, config: dict[str, Any], written: list[Written], plain: list[str]
    ) -> dict[str, dict[str, Any]]:
        names = {"nvfp4": "NVFP4" if self.activations else "W4A16_NVFP4", "mxfp8": "MXFP8"}
        kinds = [kind for kind in names if any(w.kind == kind for w in written)]
        groups: dict[str, Any] = {}
        for i, kind in enumerate(kinds):
            arguments = {"dynamic": False, "num_bits": 4 if kind == "nvfp4" else 8, "type": "float"}
            arguments["group_size"] = GROUP[kind]
            groups[f"group_{i}"] = {"weights": arguments, "targets": ["Linear"]}
            if self.activations:
                groups[f"group_{i}"]["input_activations"] = {**arguments, "dynamic": kind == "mxfp8"}
            if len(kinds) > 1:
                groups[f"group_{i}"]["targets"] = [w.module for w in written if w.kind == kind]
        mixed = len(kinds) > 1
        layers = {w.module: {"quant_algo": names[w.kind], "group_size": GROUP[w.kind]} for w in written}
        common: dict[str, Any] = {"quant_algo": "MIXED_PRECISION" if mixed else names[kinds[0]]}
        if mixed:
            common["quantized_layers"] = layers
        else:
            common["group_size"] = GROUP[kinds[0]]
        quantization = {"config_groups": groups, "ignore": plain, "kv_cache_scheme": None, **common}
        return {
            "config.json": {
                **config,
                "quantization_config": {**quantization, "producer": PRODUCER, "quant_method": "modelopt"},
            },
            "hf_quant_config.json": {
                "producer": PRODUCER,
                "quantization": {
                    "kv_cache_quant_algo": None,
                    "group_size": 16,
                    **common,
                    "exclude_modules": plain,
                },
            },
        }

    def find(self, folder: Folder) -> list[Stored]:
        found = []
        for name, entry in folder.tensors.items():
            module, _, leaf = name.rpartition(".")
            scale, outer = f"{module}.weight_scale", f"{module}.weight_scale_2"
            if leaf != "weight" or len(entry.shape) != 2:
                continue
            if entry.dtype == "U8" or outer in folder:
                activations = f"{module}.input_scale"
                expected = {name: "U8", scale: "F8_E4M3", outer: "F32", activations: "F32"}
                found.append(
                    Stored(
                        module=module,
                        kind="nvfp4",
                        codes=name,
                        scales=scale,
                        outer=outer,
                        input=activations,
                        expected=expected,
                    )
                )
            elif entry.dtype == "F8_E4M3":
                expected = {name: "F8_E4M3", scale: "U8"}
                found.append(Stored(module=module, kind="mxfp8", codes=name, scales=scale, expected=expected))
        return found
