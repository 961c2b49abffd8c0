"""compressed-tensors: what llm-compressor writes and vLLM, SGLang and transformers read.

`weight_global_scale` [1] is S_enc, a number to divide by. vLLM inverts it once (1/S_enc is the trainer's
S_dec to the bit) and multiplies; compressed_tensors' own decompressor computes code * (scale / S_enc)
instead, whose FP32 result may differ from the trainer's (code * scale) * S_dec by two units in the last
place.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from nybble.checkpoints.dialects.base import Dialect, Pieces, Stored, Written, scale_bytes, scale_specs
from nybble.checkpoints.header import section
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.writer import Spec

FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


class CompressedTensors(Dialect):
    """See the module."""

    name = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]] = ("nvfp4", "mxfp4", "mxfp8")

    def matrix_specs(self, module: str, rows: int, cols: int, kind: str) -> list[Spec]:
        if kind == "mxfp8":
            return [Spec(f"{module}.weight", "F8_E4M3", (rows, cols)), scale_specs(module, rows, cols, kind)]
        specs = [
            Spec(f"{module}.weight_packed", "U8", (rows, cols // 2)),
            scale_specs(module, rows, cols, kind),
        ]
        if kind == "nvfp4":
            specs.append(Spec(f"{module}.weight_global_scale", "F32", (1,)))
            if self.activations:
                specs.append(Spec(f"{module}.input_global_scale", "F32", (1,)))
        return specs

    def matrix_tensors(self, module: str, packed: Packed) -> Pieces:
        if packed.kind == "mxfp8":
            yield f"{module}.weight", packed.codes.view(torch.float8_e4m3fn), 0
        else:
            yield f"{module}.weight_packed", packed.codes, 0
        yield f"{module}.weight_scale", scale_bytes(packed), 0
        if packed.kind == "nvfp4":
            assert packed.divisor is not None
            yield f"{module}.weight_global_scale", packed.divisor.reshape(1), 0
            if self.activations:
                # 1 leaves the range of activations to the block scales alone: nothing was calibrated
                yield f"{module}.input_global_scale", torch.ones(1), 0

    def configs(
        self, config: dict[str, Any], written: list[Written], plain: list[str]
    ) -> dict[str, dict[str, Any]]:
        kinds = [kind for kind in FORMATS if any(w.kind == kind for w in written)]
        groups = {}
        for i, kind in enumerate(kinds):
            modules = [w.module for w in written if w.kind == kind]
            groups[f"group_{i}"] = {
                # "Linear" is what every reader knows; groups that share a model are told apart by name
                "targets": ["Linear"] if len(kinds) == 1 else _patterns(modules),
                "weights": _arguments(kind, dynamic=False),
                "input_activations": _arguments(kind, dynamic="local" if kind == "nvfp4" else True)
                if self.activations
                else None,
                "output_activations": None,
                "format": FORMATS[kind],
            }
        quantization = {
            "config_groups": groups,
            "quant_method": "compressed-tensors",
            "format": FORMATS[kinds[0]] if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "ignore": plain,
        }
        return {"config.json": {**config, "quantization_config": quantization}}

    def find(self, folder: Folder) -> list[Stored]:
        groups = section(folder.config, "quantization_config", "config_groups")
        w4a4 = any(section(groups, name, "input_activations").get("dynamic") == "local" for name in groups)
        found = []
        for name, entry in folder.tensors.items():
            module, _, leaf = name.rpartition(".")
            scale = f"{module}.weight_scale"
            if leaf == "weight_packed":
                outer = f"{module}.weight_global_scale"
                nvfp4 = outer in folder or (scale in folder and folder.entry(scale).dtype == "F8_E4M3")
                found.append(
                    Stored(
                        module=module,
                        kind="nvfp4" if nvfp4 else "mxfp4",
                        codes=name,
                        scales=scale,
                        outer=outer if nvfp4 else None,
                        convention="divisor",
                        input=f"{module}.input_global_scale" if nvfp4 and w4a4 else None,
                        expected={name: "U8", scale: "F8_E4M3" if nvfp4 else "U8", outer: "F32"},
                    )
                )
            elif leaf == "weight" and entry.dtype == "F8_E4M3":
                expected = {name: "F8_E4M3", scale: "U8"}
                found.append(Stored(module=module, kind="mxfp8", codes=name, scales=scale, expected=expected))
        return found


def _arguments(kind: str, dynamic: bool | str) -> dict[str, Any]:
    arguments = {
        "num_bits": 8 if kind == "mxfp8" else 4,
        "type": "float",
        "symmetric": True,
        "group_size": 16 if kind == "nvfp4" else 32,
        "strategy": "tensor_group" if kind == "nvfp4" else "group",
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if kind == "nvfp4" else "torch.uint8",
    }
    if dynamic == "local":
        arguments["observer"] = "static_minmax"
    return arguments


def _patterns(modules: list[str]) -> list[str]:
    """Exact names, and one pattern for all experts of a layer."""
    patterns: dict[str, None] = {}
    for module in modules:
        bank, marker, _ = module.partition(".experts.")
        if marker:
            patterns[rf"re:{re.escape(bank)}\.experts\.\d+\.\w+$"] = None
        else:
            patterns[module] = None
    return list(patterns)
