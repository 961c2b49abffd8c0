"""The dialect of the published Inkling 2 checkpoints: a layer's experts in four 3-D tensors, the rest BF16.

`w13_weight` holds gate and up rows in turn (gate 0, up 0, gate 1, ...), NVFP4 with two codes a byte or MXFP8,
`_scale` the block scales, and readers multiply with `_amax`[expert] / `_outer_scale_denominator` in FP32.
That quotient reaches every FP32 number only when the denominator is a power of two: with 2688 itself a third
of the trainer's scales could be met to within one unit in the last place only. So the denominator here is
2048 and `_amax` is the trainer's S_dec times it: the weights are then the trainer's to the bit in every
reader, and `_amax` is 0.76 of the largest magnitude (1.33 of it with Four Over Six).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from nybble import formats
from nybble.checkpoints.dialects.base import Dialect, Pieces, Stored, Written
from nybble.checkpoints.packed import Packed
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import Bank
from nybble.checkpoints.writer import Spec
from nybble.errors import CheckpointError

DENOMINATOR = 2048.0


class Inkling2(Dialect):
    """See the module."""

    name = "inkling2"
    kinds: ClassVar[tuple[str, ...]] = ("nvfp4", "mxfp8")

    def matrix_specs(self, module: str, rows: int, cols: int, kind: str) -> list[Spec]:
        raise CheckpointError(
            f"{module} [{rows}, {cols}] in {kind}: the inkling2 dialect quantises experts only; keep linears "
            "in bf16"
        )

    def matrix_tensors(self, module: str, packed: Packed) -> Pieces:
        raise CheckpointError(f"{module} in {packed.kind}: the inkling2 dialect quantises experts only")

    def bank_modules(self, bank: Bank) -> list[str]:
        return [bank.module]

    def bank_specs(self, bank: Bank, kind: str) -> list[Spec]:
        if not bank.gated:
            raise CheckpointError(
                f"{bank.module}: the inkling2 dialect has no name for experts without a gate"
            )
        specs = []
        for leaf, rows, cols in (("w13", bank.rows, bank.hidden), ("w2", bank.hidden, bank.width)):
            name, experts = f"{bank.module}.{leaf}_weight", bank.experts
            if kind == "bf16":
                specs.append(Spec(name, "BF16", (experts, rows, cols)))
                continue
            block = formats.get(kind).block_cols
            assert block is not None
            if kind == "mxfp8":
                specs.append(Spec(name, "F8_E4M3", (experts, rows, cols)))
                specs.append(Spec(f"{name}_scale", "U8", (experts, rows, cols // block)))
                continue
            specs.append(Spec(name, "U8", (experts, rows, cols // 2)))
            specs.append(Spec(f"{name}_scale", "F8_E4M3", (experts, rows, cols // block)))
            specs.append(Spec(f"{name}_amax", "F32", (experts,)))
            specs.append(Spec(f"{name}_outer_scale_denominator", "F32", ()))
        return specs

    def bank_tensors(self, bank: Bank, start: int, first: Packed | Tensor, down: Packed | Tensor) -> Pieces:
        for leaf, matrix in (("w13", first), ("w2", down)):
            name = f"{bank.module}.{leaf}_weight"
            mix = interleave if leaf == "w13" else torch.Tensor.contiguous
            if isinstance(matrix, Tensor):
                yield name, mix(matrix), start
                continue
            float8 = torch.float8_e4m3fn
            codes, scales = mix(matrix.codes), mix(matrix.scales)
            yield name, codes.view(float8) if matrix.kind == "mxfp8" else codes, start
            yield f"{name}_scale", scales.view(float8) if matrix.kind == "nvfp4" else scales, start
            if matrix.kind == "nvfp4":
                assert matrix.multiplier is not None
                yield f"{name}_amax", matrix.multiplier * DENOMINATOR, start
                if start == 0:
                    yield f"{name}_outer_scale_denominator", torch.tensor(DENOMINATOR), 0

    def configs(
        self, config: dict[str, Any], written: list[Written], plain: list[str]
    ) -> dict[str, dict[str, Any]]:
        algorithm = {
            "nvfp4": {"quant_algo": "NVFP4" if self.activations else "W4A16_NVFP4", "group_size": 16},
            "mxfp8": {"quant_algo": "MXFP8", "group_size": 32},
        }
        return {
            "config.json": config,
            "hf_quant_config.json": {
                "producer": {"name": "nybble"},
                "quantization": {
                    "quant_algo": "MIXED_PRECISION",
                    "kv_cache_quant_algo": None,
                    "group_size": 16,
                    "quantized_layers": {w.module: algorithm[w.kind] for w in written},
                    "exclude_modules": plain,
                },
            },
        }

    def find(self, folder: Folder) -> list[Stored]:
        found = []
        for name, entry in folder.tensors.items():
            if not name.endswith((".w13_weight", ".w2_weight")) or entry.dtype not in ("U8", "F8_E4M3"):
                continue
            amax, denominator = f"{name}_amax", f"{name}_outer_scale_denominator"
            nvfp4 = entry.dtype == "U8" or amax in folder
            expected = {name: "U8" if nvfp4 else "F8_E4M3", f"{name}_scale": "F8_E4M3" if nvfp4 else "U8"}
            found.append(
                Stored(
                    module=name.removesuffix("_weight"),
                    kind="nvfp4" if nvfp4 else "mxfp8",
                    codes=name,
                    scales=f"{name}_scale",
                    outer=amax if nvfp4 else None,
                    convention="amax",
                    rank=3,
                    denominator=denominator if nvfp4 else None,
                    expected={**expected, amax: "F32", denominator: "F32"},
                )
            )
        return found


def interleave(matrix: Tensor) -> Tensor:
    """[..., 2I, C] with gate rows first to rows in turn."""
    half = matrix.shape[-2] // 2
    return torch.stack((matrix[..., :half, :], matrix[..., half:, :]), dim=-2).flatten(-3, -2)


def deinterleave(matrix: Tensor) -> Tensor:
    """The reverse."""
    return torch.cat((matrix[..., 0::2, :], matrix[..., 1::2, :]), dim=-2)
